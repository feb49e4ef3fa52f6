"""The settings of each feature, and which of them are to meet: its axes, in the words of `case.py`.

A setting is the part of a case that it decides. Every pair of settings of two axes that a valid case of the feature's product has
is to occur in a run; `--full` runs the products whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.spec.schedules import SCHEDULES
from tests.layouts.case import DEFAULTS, FSDP_WAYS, KINDS, LORA, MUON, RULES, fits
from tests.support.covering import Case

Setting = Mapping[str, Any]
"""What a case has on some axes."""


def each(axis: str, settings: Sequence[Any]) -> list[Setting]:
    """Settings of one axis."""
    return [{axis: setting} for setting in settings]


def sizes(*rows: tuple[int, ...], names: Sequence[str] = ("tp", "pp", "dp"), **others: Any) -> list[Setting]:
    """Sizes of groups, with those that the rows leave out if they are given."""
    return [{**dict(zip(names, row, strict=True)), **others} for row in rows]


def schedules(*names: str) -> list[Setting]:
    """Schedules, with the chunks on a stage that each is run with."""
    return [{"schedule": name, "virtual_stages": SCHEDULES[name].chunks_per_stage or 2} for name in names or sorted(SCHEDULES)]


def kin(*names: str) -> list[Setting]:
    """Styles of models, tied or not."""
    return [{"style": name.removesuffix(" tied"), "tied": name.endswith(" tied")} for name in names]


TIED = each("tied", [True, False])
SEQUENCE = each("sequence_parallel", [False, True])
OVERLAPPING = each("sequence_parallel", [False, True, "overlapping"])
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
SHARDING = each("sharding", STRATEGIES)


_signature = functools.cache(inspect.signature)


@dataclass(frozen=True)
class Feature:
    """Axes of a product."""

    axes: Mapping[str, Sequence[Setting]]
    valid: Callable[..., bool] = lambda: True
    """Which cases the product has of those that may be run, by the axes that its parameters name."""
    shards_alone: bool = False
    """Whether a data rank shards alone too."""

    def case(self, chosen: Iterable[Setting]) -> Case:
        """The whole case that these settings of its axes make."""
        return completed(DEFAULTS | {axis: value for setting in chosen for axis, value in setting.items()})

    def runs(self, case: Case) -> bool:
        """Whether a case is one of its product. Of one that is not whole, as far as it is known."""
        if not self.shards_alone and case.get("sharding", "no_shard") != "no_shard" and case.get("dp") == case.get("cp") == 1:
            return False
        axes = _signature(self.valid).parameters
        return (not case.keys() >= axes.keys() or self.valid(*(case[axis] for axis in axes))) and fits(case)

    def cases(self, *parts: Setting) -> Iterator[Case]:
        """Yield the cases of the product, or those that have all of these settings."""
        decided = {axis: value for part in parts for axis, value in part.items()}
        left = [settings for settings in self.axes.values() if not settings[0].keys() <= decided.keys()]
        return self._with(decided, left)

    def _with(self, decided: Setting, left: Sequence[Sequence[Setting]]) -> Iterator[Case]:
        if not self.runs({**decided}):
            return
        if left:
            for setting in left[0]:
                yield from self._with({**decided, **setting}, left[1:])
        elif self.runs(case := self.case([decided])):
            yield case


def completed(case: Case) -> Case:
    """Fill in the settings that follow from the others and that a case leaves out."""
    case = dict(case)
    if case["cp"] > 1 and case["way"] is None:
        case["way"] = "all_gather"
    if case["experts"] and case["dispatcher"] is None:
        case["dispatcher"] = "alltoall"
    if case["experts"] and case["tp"] > 1:
        case["sequence_parallel"] = True
    if case["pp"] > 1 and case["microbatches"] == 2:
        case["microbatches"] = 3  # so that forwards and backwards alternate
    return case


POWERS = (1, 2, 4, 8)
EXPERTS = [
    (1, 1, 1, 1, 1, None),
    (1, 1, 1, 2, 2, None),
    (1, 1, 1, 4, 4, None),
    (1, 1, 1, 4, 2, None),
    (1, 1, 1, 4, 1, None),
    (1, 1, 2, 2, 1, None),
    (2, 1, 1, 1, 1, None),
    (2, 1, 1, 2, 2, 1),
    (2, 1, 1, 2, 2, 2),
    (1, 2, 1, 1, 2, None),
    (1, 2, 1, 2, 1, 2),
    (1, 1, 2, 2, 2, None),
    (2, 2, 1, 1, 2, 1),
]
FEATURES: dict[str, Feature] = {
    "layouts": Feature(
        {
            "sizes": sizes(
                *((tp, pp, dp) for n in POWERS for tp in POWERS for pp in POWERS for dp in POWERS if tp * pp * dp == n), cp=1
            ),
            "style": each("style", ["gpt2", "llama", "deepseek"]),
            "tied": TIED,
            "sequence_parallel": OVERLAPPING,
            "schedule": schedules(),
            "overlap": each("overlap", [True, False]),
            "pp_before_dp": each("pp_before_dp", [False, True]),
            "sharding": SHARDING,
            "overlap_param_gather": each("overlap_param_gather", [False, True]),
            "attention": each("attention", ["auto", "math"]),
        },
        # On one stage a schedule is still an order of its own; two chunks with late weight gradients stand for all, on few ranks.
        valid=lambda tp, pp, dp, schedule, overlap: (
            (dp > 1 or not overlap) and (pp > 1 or schedule == "1f1b" or (schedule == "zb-v" and tp * dp <= 2))
        ),
    ),
    "models": Feature(
        {
            "style": each("style", ["sandwich", "post", "parallel", "bare", "parallel-sandwich"]),
            "sizes": sizes((1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), cp=1),
            "sequence_parallel": SEQUENCE,
            "schedule": schedules("1f1b", "interleaved", "zb-v"),
            "sharding": each("sharding", ["no_shard", "optim", "optim_grads_params"]),
            "memory": each("memory", ["kept", "norms and activations", "the mlp"]),
        },
        valid=lambda pp, schedule: pp > 1 or schedule == "1f1b",
    ),
    "attention": Feature(
        {
            "style": each("style", ["two bases", "sinks", "capped", "norms over all heads", "latents", "latents, windows"]),
            "sizes": sizes((2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), cp=1),
            "schedule": schedules("1f1b", "interleaved", "zb-h1", "zb-v"),
            "sequence_parallel": SEQUENCE,
            "documents": each("documents", [None, "all"]),
            "memory": each("memory", ["kept", "full", "attention and norms, host"]),
            "sharding": each("sharding", ["no_shard", "optim_grads", "optim_grads_params"]),
        },
        valid=lambda pp, schedule: pp > 1 or schedule == "1f1b",
    ),
    "context": Feature(
        {
            "sizes": sizes(
                *((1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (1, 4, 2, 1), (2, 2, 2, 1), (2, 2, 1, 2)),
                names=("tp", "cp", "pp", "dp"),
            ),
            "way": each("way", ["all_gather", "p2p", "a2a", "each"]),
            "style": [
                *kin("gpt2 tied", "yarn tied", "longrope", "deepseek"),
                *each("style", ["sinks", "capped"]),
            ],
            "documents": each("documents", [None, "all"]),
            "schedule": schedules("1f1b", "interleaved", "zb-h1", "zb-v"),
            "sequence_parallel": OVERLAPPING,
            "memory": [
                *({"memory": memory, "loss_chunk": 0} for memory in ("kept", "full", "attention and norms, host")),
                {"memory": "kept", "loss_chunk": 3},
            ],
            "sharding": SHARDING,
            "micro_batch_size": each("micro_batch_size", [1, 2]),
        },
        valid=lambda pp, schedule: pp > 1 or schedule == "1f1b",
    ),
    "experts": Feature(
        {
            "experts": each("experts", [*KINDS]),
            "sizes": sizes(*EXPERTS, names=("tp", "cp", "pp", "dp", "ep", "etp")),  # type: ignore[arg-type]
            "dispatcher": each("dispatcher", ["alltoall", "allgather"]),
            "schedule": schedules("1f1b", "interleaved", "zb-h1", "zb-v"),
            "sharding": SHARDING,
            "memory": each("memory", ["kept", "full", "norms and the mlp", "host"]),
            "documents": each("documents", [None, "all", "padded"]),
            "micro_batch_size": each("micro_batch_size", [1, 2]),
            "depths": each("depths", [0, 1, 2]),
            "fsdp": [
                *({"fsdp_way": way, "fsdp_shard_size": None} for way in FSDP_WAYS),
                {"fsdp_way": "always", "fsdp_shard_size": 2},
            ],
        },
        valid=lambda pp, schedule: pp > 1 or schedule in ("1f1b", "zb-h1"),
    ),
    "lora": Feature(
        {
            "sizes": sizes((1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1)),
            "cp": each("cp", [1, 2]),
            "style": kin("gpt2 tied", "llama"),
            "lora": each("lora", LORA),
            "sequence_parallel": OVERLAPPING,
            "schedule": schedules(),
            "sharding": each("sharding", ["no_shard", "optim", "optim_grads"]),
            "loss_chunk": each("loss_chunk", [0, 4]),
            "memory": each("memory", ["kept", "full", "attention, norms, activations", "host"]),
        },
        valid=lambda tp, cp, pp, dp, schedule: tp * cp * pp * dp <= 4 and (pp > 1 or schedule in ("1f1b", "zb-v")),
    ),
    "loss": Feature(
        {
            "sizes": sizes((3, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), cp=1),
            "loss_chunk": each("loss_chunk", [0, 1, 3, 4, 1000]),
            "z_loss": each("z_loss", [0.0, 0.05]),
            "smoothing": each("smoothing", [0.0, 0.3]),
            "style": kin("gpt2 tied", "llama", "llama capped"),
            "sequence_parallel": OVERLAPPING,
            "schedule": schedules(),
            "sharding": SHARDING,
            "documents": each("documents", [None, "all"]),
        },
        valid=lambda pp, schedule: pp > 1 or schedule in ("1f1b", "zb-v"),
    ),
    "memory": Feature(
        {
            "memory": each(
                "memory",
                [
                    "full",
                    "full in groups of two",
                    "the first of each chunk",
                    "three of the first stage, one of the second",
                    "norms and activations",
                    "host",
                    "full, host",
                    "norms and the mlp, one layer of each chunk in host memory",
                ],
            ),
            "sizes": sizes((1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), cp=1),
            "schedule": schedules(),
            "sequence_parallel": OVERLAPPING,
            "model": [
                {"style": "gpt2", "tied": True, "documents": None},
                {"style": "gpt2", "tied": False, "documents": "all"},
                {"style": "llama", "tied": True, "documents": "all"},
                {"style": "llama", "tied": False, "documents": None},
            ],
            "sharding": each("sharding", ["no_shard", "optim_grads", "optim_grads_params"]),
            "loss_chunk": each("loss_chunk", [0, 4]),
            "compiled": each("compiled", [False, True]),
        },
        valid=lambda pp, schedule: pp > 1 or schedule in ("1f1b", "zb-h1"),
    ),
    "mtp": Feature(
        {
            "sizes": sizes((1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 3, 1)),
            "cp": each("cp", [1, 2]),
            "depths": each("depths", [1, 2, 3]),
            "style": kin("gpt2 tied", "llama", "llama tied"),
            "sequence_parallel": SEQUENCE,
            "schedule": schedules(),
            "sharding": SHARDING,
            "loss_chunk": each("loss_chunk", [0, 4]),
            "documents": each("documents", [None, "attention", "all"]),
            "memory": each("memory", ["kept", "full", "attention, norms, the mlp, host", "full, host"]),
            "beside": [{"z_loss": 0.0, "smoothing": 0.0}, {"z_loss": 0.05, "smoothing": 0.3}],
        },
        valid=lambda pp, schedule: pp > 1 or schedule in ("1f1b", "zb-v"),
    ),
    "muon": Feature(
        {
            "sizes": sizes((1, 1, 1), (1, 1, 3), (2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), cp=1),
            "sequence_parallel": SEQUENCE,
            "sharding": SHARDING,
            "style": [*kin("gpt2 tied"), *each("style", ["llama, norms of heads", "deepseek"])],
            "rule": each("rule", [*MUON]),
            "offload": each("offload", [None, 0.5, 1.0]),
            "overlap": each("overlap", [True, False]),
            "bucket_size": each("bucket_size", [500, None]),
            "fsdp_shard_size": each("fsdp_shard_size", [None, 1]),
        },
        shards_alone=True,
    ),
    "optimizers": Feature(
        {
            "rule": each("rule", [rule for rule in RULES if rule != "adam" and rule not in MUON]),
            "sizes": sizes((1, 1, 1), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 2, 2), (4, 1, 2), (2, 2, 2), (2, 1, 3), cp=1),
            "style": each("style", ["gpt2 without biases", "llama"]),
            "tied": TIED,
            "sequence_parallel": SEQUENCE,
            "sharding": SHARDING,
            "bucket_size": each("bucket_size", [500, 3000]),
            "offload": each("offload", [None, 0.5]),
            "fsdp_shard_size": each("fsdp_shard_size", [None, 2]),
        },
    ),
    "packing": Feature(
        {
            "sizes": sizes((1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2), cp=1),
            "schedule": schedules("1f1b", "interleaved"),
            "sequence_parallel": SEQUENCE,
            "positions": [
                {"documents": "all", "style": "gpt2"},
                {"documents": "all", "style": "llama"},
                {"documents": "all", "style": "no positions"},
            ],
            "grouped": each("grouped", [True, False]),
            "tied": TIED,
            "micro_batch_size": each("micro_batch_size", [1, 2]),
            "attention": each("attention", ["auto", "math"]),
        },
    ),
    "pipeline": Feature(
        {
            "sizes": sizes((1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), cp=1),
            "schedule": each("schedule", sorted(SCHEDULES)),
            "virtual_stages": each("virtual_stages", [1, 2, 3]),
            "split": each("split", ["even", "first", "layout"]),
            "microbatches": each("microbatches", [1, 2, 5]),
            "style": kin("gpt2 tied", "llama"),
            "overlap": each("overlap", [True, False]),
            "overlap_p2p": each("overlap_p2p", [True, False]),
            "sharding": SHARDING,
        },
        valid=lambda dp, overlap: dp > 1 or not overlap,
    ),
}
