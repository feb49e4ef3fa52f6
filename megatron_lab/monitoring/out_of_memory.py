"""Error message of a rank that runs out of memory: the current operation, the allocated memory by purpose, and settings to
change."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.config.config import Config
from megatron.config.parsed_flags import get_current_job
from megatron.spec.operations import OpType
from megatron.training.features import Feature
from megatron.training.step import TrainStep
from megatron_lab.monitoring.memory_report import MemoryAccount, MemoryFeature
from megatron_lab.monitoring.rehearsal import resolve_device
from megatron_lab.planner.fit import count_max_chunk_layers, get_device_memory, list_levers
from megatron_lab.planner.units import format_bytes

_REQUEST_PATTERN = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))")
_OP_NAMES = {
    OpType.FORWARD: "the forward pass",
    OpType.BACKWARD: "the backward pass",
    OpType.INPUT_GRAD: "the input gradients",
    OpType.WEIGHT_GRAD: "the weight gradients",
    OpType.RECOMPUTE: "the recomputation of layers",
}
_MIN_UNUSED_RATIO = 0.05  # fraction of the reserved memory; above it expandable segments are suggested
_MAX_SUGGESTIONS = 6


@dataclass
class OutOfMemoryReport:
    """Builder of the message for an out-of-memory error: where it happened, how memory is used, and which settings to change.

    Args:
        config: settings of the run.
        account: measured memory of this rank and, with --log-memory, the predicted memory.
        vocab_size: rows of the word embedding; 1 if not known yet.
    """

    config: Config
    account: MemoryAccount
    vocab_size: int = 1

    def format_message(self, error: BaseException) -> str:
        """Format the message for an out-of-memory error. Formatting itself allocates little memory.

        The message does not name the rank. The tensors of the failed step are released first.
        """
        lines = [f"out of memory {self._describe_location(error)}{_format_request(error)}."]
        reserved = self._get_reserved()
        traceback.clear_frames(error.__traceback__)  # release the tensors of the failed step
        for describe in (self._describe_allocations, self._suggest_changes):
            try:
                lines += describe(*reserved)
            except Exception as explanation_error:  # noqa: BLE001 - an incomplete message is better than none
                lines.append(f"  (no further explanation: {type(explanation_error).__name__})")
        return "\n".join(lines)

    def _describe_location(self, error: BaseException) -> str:
        step = self.account.step
        op = None if step is None else step.executor.current_op
        if op is not None:
            stage = "" if step is None or step.context.topology.pp == 1 else f" on stage {step.context.coordinates['pp']}"
            return f"in {_OP_NAMES[op.type]} of chunk {op.chunk}, microbatch {op.microbatch}{stage}"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}megatron{os.sep}" in frame.filename]
        if not frames:
            return "before the model was built"
        phase = "while the model's state is allocated" if step is None else "between the operations of the pipeline"
        return f"{phase}, at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"

    def _get_reserved(self) -> tuple[int, int]:
        """Return the bytes that torch's allocator has reserved on the device, and how many of them are unused; (0, 0) on the
        CPU."""
        step = self.account.step
        if step is None or step.context.device.type != "cuda":
            return 0, 0
        reserved = torch.cuda.memory_reserved(step.context.device)
        return reserved, reserved - torch.cuda.memory_allocated(step.context.device)

    def _describe_allocations(self, reserved: int, unused: int) -> list[str]:
        """Return lines of the message: the allocated memory by purpose, with the predicted memory if it is known.

        Args:
            reserved: bytes that torch's allocator has reserved on the device.
            unused: bytes of the reserved memory that no tensor uses.
        """
        account = self.account
        if account.step is None:
            return []
        allocations = []
        for name, measured, planned in account.build_rows():
            if measured or planned:
                allocations.append(
                    f"{name} {format_bytes(measured)}" + (f" (planned {format_bytes(planned)})" if planned is not None else "")
                )
        allocator_lines = [
            f"  torch's allocator has reserved {format_bytes(reserved)} of the device, of which {format_bytes(unused)} are unused"
        ]
        return [f"  allocated: {', '.join(allocations)}", *(allocator_lines if reserved else [])]

    def _suggest_changes(self, reserved: int, unused: int) -> list[str]:
        """Return lines of the message: settings to change, of which those that slow training down least come first.

        Args:
            reserved: bytes that torch's allocator has reserved on the device.
            unused: bytes of the reserved memory that no tensor uses.
        """
        allocator_config = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        suggestions = []
        if unused > _MIN_UNUSED_RATIO * reserved and "expandable_segments:True" not in allocator_config:
            suggestions.append("PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, against fragmentation")
        if self.account.plan is not None:
            suggestions += [line for line in self.account.plan.advice if line.startswith("the fullest rank")]
        config, job = resolve_device(self.config), get_current_job()
        suggestions += [
            str(lever) for _, lever in list_levers(config, job, self.vocab_size, count_max_chunk_layers(config, self.vocab_size))
        ][: _MAX_SUGGESTIONS - len(suggestions)]
        limit = get_device_memory(config)
        size = "N" if limit is None else f"{limit / 1e9:.4g}"
        dry_run = f"--dry-run --world-size {job.world_size} --gpus-per-node {job.gpus_per_node} --device-memory-gb {size}"
        numbered = [f"    {i}. {suggestion}" for i, suggestion in enumerate(suggestions, 1)]
        return [
            *(["  Settings to change, the cheapest first:", *numbered] if suggestions else []),
            f"  The same flags with {dry_run} show whether a change is enough.",
        ]


def _format_request(error: BaseException) -> str:
    match = _REQUEST_PATTERN.search(str(error))
    return f": {match.group(1)} more were requested" if match else ""


def explain_out_of_memory(
    error: BaseException, config: Config, features: Iterable[Feature], step: TrainStep | None, baseline: int, vocab_size: int
) -> str:
    """Return the message for a run that is out of memory: where it happened, how memory is used, and which settings to change.

    Args:
        config: settings of the run.
        features: features of the run. The feature of --log-memory, if enabled, has the predicted memory.
        step: training step; None before the model is built.
        baseline: bytes of host memory before the model was built.
        vocab_size: rows of the word embedding, as far as known.
    """
    accounts = (feature.account for feature in features if isinstance(feature, MemoryFeature))
    account = next(accounts, MemoryAccount(baseline))
    account.step = step
    return OutOfMemoryReport(config, account, vocab_size).format_message(error)
