"""The message of a rank whose memory is exhausted: during which operation, what was allocated for what, what to change first."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.config.config import Config
from megatron.config.given import this_job
from megatron.spec.operations import OpKind
from megatron.training.features import Feature
from megatron.training.step import TrainStep
from megatron_lab.monitoring.memory_report import MemoryAccount, MemoryFeature
from megatron_lab.monitoring.rehearsal import on_this_device
from megatron_lab.planner.fit import levers, memory_limit, most_layers
from megatron_lab.planner.state_report import amount

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))")
_KINDS = {
    OpKind.FORWARD: "the forward",
    OpKind.BACKWARD: "the backward",
    OpKind.INPUT_GRAD: "the input gradients",
    OpKind.WEIGHT_GRAD: "the weight gradients",
    OpKind.RECOMPUTE: "the second run of layers",
}
_WIDE_GAPS = 0.05  # of what the allocator has; more of it in gaps is worth another setting
_SHOWN = 6


@dataclass
class Exhaustion:
    """Explains that memory is exhausted.

    Args:
        config: of the run.
        vocab_size: rows of the word embedding, as far as they are known.
    """

    config: Config
    account: MemoryAccount
    vocab_size: int = 1

    def words(self, error: BaseException) -> str:
        """The message, without the number of the rank. It takes little memory itself."""
        lines = [f"out of memory {self._where(error)}{_asked(error)}."]
        reserved = self._reserved()
        traceback.clear_frames(error.__traceback__)  # whose tensors are of no more use
        for part in (self._taken, self._cures):
            try:
                lines += part(*reserved)
            except Exception as other:  # noqa: BLE001 - what is left of the message is still worth more than nothing
                lines.append(f"  (more cannot be said: {type(other).__name__})")
        return "\n".join(lines)

    def _where(self, error: BaseException) -> str:
        step = self.account.step
        op = None if step is None else step.executor.current
        if op is not None:
            stage = "" if step is None or step.context.topology.pp == 1 else f" on stage {step.context.coordinates['pp']}"
            return f"in {_KINDS[op.kind]} of chunk {op.chunk}, microbatch {op.microbatch}{stage}"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}megatron{os.sep}" in frame.filename]
        if not frames:
            return "before the model was built"
        phase = "while the model's state is allocated" if step is None else "between the operations of the pipeline"
        return f"{phase}, at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"

    def _reserved(self) -> tuple[int, int]:
        """Bytes that torch's allocator has from the device, and those of them that are in no use; 0 on the CPU."""
        step = self.account.step
        if step is None or step.context.device.type != "cuda":
            return 0, 0
        reserved = torch.cuda.memory_reserved(step.context.device)
        return reserved, reserved - torch.cuda.memory_allocated(step.context.device)

    def _taken(self, reserved: int, unused: int) -> list[str]:
        """What was allocated for what."""
        account = self.account
        if account.step is None:
            return []
        parts = []
        for name, measured, planned in account.rows():
            if measured or planned:
                parts.append(f"{name} {amount(measured)}" + (f" (planned {amount(planned)})" if planned is not None else ""))
        gaps = [f"  of {amount(reserved)} that torch's allocator has from the device, {amount(unused)} are in no use"]
        return [f"  allocated: {', '.join(parts)}", *(gaps if reserved else [])]

    def _cures(self, reserved: int, unused: int) -> list[str]:
        """What to change, the cheapest first."""
        settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        found = []
        if unused > _WIDE_GAPS * reserved and "expandable_segments:True" not in settings:
            found.append("PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, against gaps")
        if self.account.plan is not None:
            found += [line for line in self.account.plan.advice if line.startswith("the fullest rank")]
        config, job = on_this_device(self.config), this_job()
        found += [str(one) for _, one in levers(config, job, self.vocab_size, most_layers(config, self.vocab_size))][
            : _SHOWN - len(found)
        ]
        limit = memory_limit(config)
        size = "N" if limit is None else f"{limit / 1e9:.4g}"
        dry_run = f"--dry-run --world-size {job.world_size} --gpus-per-node {job.gpus_per_node} --device-memory-gb {size}"
        numbered = [f"    {number}. {cure}" for number, cure in enumerate(found, 1)]
        return [
            *(["  What to change, the cheapest first:", *numbered] if found else []),
            f"  The same flags with {dry_run} say which of it is enough.",
        ]


def _asked(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    return f": {found.group(1)} more were asked for" if found else ""


def words_for(
    error: BaseException, config: Config, features: Iterable[Feature], step: TrainStep | None, before: int, vocab_size: int
) -> str:
    """The message of a run whose memory is exhausted.

    Args:
        config: the settings as they were given.
        features: of the run, one of which may know its plan.
        step: if the model is built.
        before: bytes of host memory that the process had before it was.
        vocab_size: rows of the word embedding, as far as they are known.
    """
    known = (feature.account for feature in features if isinstance(feature, MemoryFeature))
    account = next(known, MemoryAccount(before))
    account.step = step
    return Exhaustion(config, account, vocab_size).words(error)
