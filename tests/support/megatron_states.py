"""A model with optimizer state as Megatron-LM's ranks hold it, for writers of its checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_lab.verification.reference.model import Batch
from megatron_lab.verification.reference.shape import ReferenceShape, Weights, build_random_weights
from megatron_lab.verification.reference.training import ReferenceUpdateRule, State, update_weights
from tests.support.legacy_checkpoints import LegacyLayout, chunk_state, write_legacy
from tests.support.reference_runs import llama_like, loss_and_gradients

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST = 2500
"""Elements at which buckets of the first chunk are closed."""
RULE = ReferenceUpdateRule("adam", 0.7, (0.9, 0.95), 1e-8)


@dataclass(frozen=True)
class TrainedModel:
    """Weights, main parameters (empty: the weights are) and moments by kind, as they are after some updates."""

    shape: ReferenceShape
    weights: Weights
    mains: Weights = field(default_factory=dict)
    moments: dict[str, Weights] = field(default_factory=dict)
    updates: int = 2

    @property
    def kinds(self) -> dict[str, Weights]:
        """Main parameters as `param`, and moments; what there is of these."""
        return {**({"param": self.mains} if self.mains else {}), **self.moments}

    def rounded(self) -> TrainedModel:
        """The same with weights in bfloat16, and main parameters and moments in float32."""
        mains = {name: tensor.float() for name, tensor in self.weights.items()}
        moments = {kind: {name: one.float() for name, one in some.items()} for kind, some in self.moments.items()}
        return replace(self, weights={name: one.bfloat16() for name, one in mains.items()}, mains=mains, moments=moments)


def trained(shape: ReferenceShape, batches: Sequence[Batch], lr: float, weight_decay: float) -> TrainedModel:
    """A model after steps of the plain reference, in float64."""
    state = State(build_random_weights(shape, seed=5))
    for batch in batches:
        update_weights(state, loss_and_gradients(shape, state.weights, batch)[1], RULE, lr, weight_decay)
    moments = {
        kind: {name: state.param_states[name][kept] for name in state.weights} for kind, kept in zip(MOMENTS, "mv", strict=True)
    }
    return TrainedModel(shape, state.weights, {}, moments, state.num_updates)


def made_up(shape: ReferenceShape) -> TrainedModel:
    """A model with arbitrary state."""
    weights = build_random_weights(shape, seed=5)
    moments = {kind: {name: one.abs() * (2 + at) for name, one in weights.items()} for at, kind in enumerate(MOMENTS)}
    return TrainedModel(shape, weights, {}, moments)


def local_tensors(shape: ReferenceShape, tensors: Weights, layout: LegacyLayout, chunk: int, rank: int) -> Weights:
    """The tensors of a chunk on one tensor rank, under Megatron-LM's names and in the order of their declaration."""
    state = chunk_state(shape, tensors, layout, chunk, rank)
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor) and not name.endswith("_extra_state")}


def flat_buckets(params: Weights, kinds: dict[str, Weights], shared: bool, most: int | None) -> list[dict[str, torch.Tensor]]:
    """State by kind in each bucket of a chunk's flat buffer, from the last parameter to the first, each at a multiple of 64.

    Args:
        params: of the chunk on the rank.
        kinds: its state by kind, each like `params`.
        shared: whether the embedding, which then has a bucket of its own, is on two stages.
        most: elements at which a bucket is closed.
    """
    buckets: list[tuple[list[tuple[str, int]], int]] = []
    starts: list[tuple[str, int]] = []
    end = 0
    for name, tensor in reversed(params.items()):
        alone = shared and name.endswith(("word_embeddings.weight", "output_layer.weight"))
        start = math.ceil(end / 64) * 64
        if alone and starts:
            buckets.append((starts, start))
            starts, start = [], 0
        starts.append((name, start))
        end = start + tensor.numel()
        if alone or (most is not None and end >= most):
            buckets.append((starts, end))
            starts, end = [], 0
    if starts:
        buckets.append((starts, end))

    def flat(tensors: Weights, starts: list[tuple[str, int]], numel: int) -> torch.Tensor:
        buffer = torch.full((numel,), 9.5, dtype=next(iter(tensors.values())).dtype)  # the padding is noise
        for name, start in starts:
            buffer[start:][: tensors[name].numel()] = tensors[name].flatten()
        return buffer

    return [{kind: flat(tensors, *bucket) for kind, tensors in kinds.items()} for bucket in buckets]


ITERATION, BATCH = 3, 6
"""Of the checkpoints: one iteration more than updates, since one was skipped."""
SCALER = {"scale": torch.tensor([4096.0]), "growth_tracker": 7, "hysteresis_tracker": 1}


def arguments_of_run(model: TrainedModel, *, sharded: bool) -> dict[str, Any]:
    return {
        **dict(optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=0.7, seed=77),
        **dict(global_batch_size=BATCH, micro_batch_size=1, train_iters=50, data_parallel_size=2, lr_warmup_init=1e-5),
        **dict(use_distributed_optimizer=sharded, overlap_grad_reduce=True, ddp_bucket_size=2500, fp16=bool(model.mains)),
        **dict(consumed_train_samples=ITERATION * BATCH, consumed_valid_samples=0),
    }


def schedule_of_run(model: TrainedModel) -> dict[str, Any]:
    return {
        **dict(max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=12, lr_decay_steps=300, lr_decay_style="cosine"),
        **dict(start_wd=0.1, end_wd=0.1, wd_incr_style="constant", wd_incr_steps=300, num_steps=model.updates * BATCH),
    }


def groups_of(params: Sequence[str], *, updates: int | None) -> list[dict[str, Any]]:
    """Parameter groups: what decays, and vectors, which do not. Parameters are numbered through all groups.

    Args:
        params: names; ".bias" and norms are vectors.
        updates: the count of updates, where groups hold it.
    """
    groups, number = [], 0
    for decays in (True, False):
        some = [name for name in params if is_vector(name) is not decays]
        step = {} if updates is None else {"step": updates}
        groups.append({"wd_mult": float(decays), "lr": 1e-3, "params": [number + at for at in range(len(some))], **step})
        number += len(some)
    return groups


def is_vector(name: str) -> bool:
    return name.endswith("bias") or "norm" in name


def write_legacy_run(folder: Path, model: TrainedModel, layout: LegacyLayout, *, sharded: bool, **changes: Any) -> Path:
    """Write a checkpoint of the format `torch` with the state of a run; returns the folder of the iteration.

    Args:
        sharded: the optimizer's state is in distrib_optim.pt.
        changes: of the arguments.
    """

    def chunk_of(kind: Weights, stage: int, rank: int, number: int) -> Weights:
        return local_tensors(model.shape, kind, layout, number * layout.pp + stage, rank)

    def optimizer_of(stage: int, rank: int) -> dict[str, Any]:
        beside = {"opt_param_scheduler": schedule_of_run(model), "num_floating_point_operations_so_far": 1e15}
        chunks = range(layout.virtual)
        names = [(chunk, name) for chunk in chunks for name in chunk_of(model.weights, stage, rank, chunk)]
        tensors = {kind: [chunk_of(some, stage, rank, chunk) for chunk in chunks] for kind, some in model.kinds.items()}
        scaler = {"grad_scaler": SCALER} if model.mains else {}
        if sharded:
            groups = [{**group, "params": []} for group in groups_of([name for _, name in names], updates=model.updates)]
            return {**beside, "optimizer": {"optimizer": {"param_groups": groups}, **scaler}}
        ordered = [[one for one in names if is_vector(one[1]) is vector] for vector in (False, True)]
        states = [
            {"step": torch.tensor(float(model.updates)), **{kind: tensors[kind][chunk][name] for kind in MOMENTS}}
            for some in ordered
            for chunk, name in some
        ]
        inner = {"state": dict(enumerate(states)), "param_groups": groups_of([name for _, name in names], updates=None)}
        if not model.mains:
            return {**beside, "optimizer": inner}
        mains = [[tensors["param"][chunk][name] for chunk, name in some] for some in ordered]
        return {**beside, "optimizer": {"optimizer": inner, "fp32_from_fp16_params": mains, **scaler}}

    settings = {**arguments_of_run(model, sharded=sharded), **changes}
    path = write_legacy(folder, model.shape, model.weights, layout, iteration=ITERATION, optimizer_of=optimizer_of, **settings)
    shared = model.shape.tied and layout.pp > 1
    for stage, rank in itertools.product(range(layout.pp if sharded else 0), range(layout.tp)):
        content: dict[Any, Any] = {"buckets_coalesced": True}
        for number in range(layout.virtual):
            all_kinds = model.kinds | {"param": model.mains or model.weights}
            kinds = {kind: chunk_of(some, stage, rank, number) for kind, some in all_kinds.items()}
            buckets = flat_buckets(kinds["param"], kinds, shared, MOST if stage == number == 0 else None)
            joined = {kind: torch.cat([bucket[kind] for bucket in buckets]) for kind in kinds}
            content[number] = {(torch.bfloat16, torch.float32): {**joined, "numel_unpadded": len(joined["param"])}}
        torch.save(content, path / layout.folder(stage, rank) / "distrib_optim.pt")
    return path


def write_legacy_example(folder: Path, vocab_size: int) -> None:
    """A --save folder with a tiny Llama at tensor 2 x pipeline 2 and the state of its run.

    Args:
        vocab_size: ids, the end of documents among them, without padding.
    """
    write_legacy_run(folder, made_up(llama_like(vocab=vocab_size)).rounded(), LegacyLayout(tp=2, pp=2), sharded=True)
