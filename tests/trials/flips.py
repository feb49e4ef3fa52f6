"""Flips single bits in runs that the sentinel watches, and tells what share of them it has found.

    python -m tests.trials.flips [--flips N] [--only LAYOUT]
    python -m tests.trials.flips --overhead

prints the tables of docs/trust.md: N flips of each bit of each kind of tensor at each layout, in random elements on random ranks.
Or it tells what a comparison costs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.parallel.accumulate import GradSink
from megatron.parallel.topology import Topology
from megatron.spec.operations import OpType
from megatron.training.loop import Loop
from megatron.training.step import StepResult, TrainStep
from megatron_lab.audit.votes import build_model_replicas
from tests.support.runs import arguments, launch, read_metrics, report, run

KINDS = ("activations", "gradients", "weights", "moments")
"""Moments with main weights, where these are apart from the weights."""
BITS = ("sign", "exponent high", "exponent low", "mantissa high", "mantissa low")
_PLACES = {torch.float32: (31, 30, 23, 22, 0), torch.bfloat16: (15, 14, 7, 6, 0)}
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {}),
    "dp 3": (3, {"global_batch_size": 6}),
    "dp 4, ZeRO-1, bf16": (4, {"use_distributed_optimizer": True, "bf16": True}),
    "dp 2, tp 2, ZeRO-2, bf16": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "data_parallel_sharding_strategy": "optim_grads",
            "bf16": True,
        },
    ),
    "dp 3, pp 2": (6, {"pipeline_model_parallel_size": 2, "global_batch_size": 12}),
    "dp 3, fully_shard": (3, {"data_parallel_sharding_strategy": "optim_grads_params", "global_batch_size": 6}),
    "dp 4, experts over 2": (
        4,
        {"num_experts": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True, "expert_model_parallel_size": 2},
    ),
}


class Flip(NamedTuple):
    """One bit of one element, in one step on one rank."""

    kind: str
    bit: str
    rank: int
    seed: int


class Outcome(NamedTuple):
    """What became of a flip."""

    flip: Flip
    found: bool
    named: bool
    """Whether the data rank (or the block that shares experts) that is named is that of the flip."""
    ended: bool
    """Whether the step gave a number that is not finite, which ends the run anyway."""


def flip_bit(tensor: torch.Tensor, element: int, bit: str) -> None:
    """Flip a bit of a contiguous tensor, which autograd does not see."""
    word = _WORDS[tensor.element_size()]
    places = _PLACES.get(tensor.dtype, (7, 6, 5, 4, 0))
    value = tensor.data.view(-1)[element : element + 1].view(word)
    place = places[BITS.index(bit)]
    sign_place = 8 * tensor.element_size() - 1
    value ^= -(1 << place) if place == sign_place else 1 << place


class Injector:
    """Plants the flips of a run in this process, one in each step from the second on.

    Args:
        rank: this process's.
        flips: one for each step; None in the first.
        log: where the rank of a flip writes the steps in which it was made.
    """

    def __init__(self, rank: int, flips: Sequence[Flip], log: Path) -> None:
        self._rank, self._flips, self._log = rank, flips, log
        self._called: list[nn.Module] = []
        self._run, self._wrote = TrainStep.run, GradSink._finish_write
        injector = self

        def run(step: TrainStep, *args: Any, **named: Any) -> Any:
            return injector._step(step, named["iteration"], lambda: injector._run(step, *args, **named))

        TrainStep.run = run  # type: ignore[assignment, method-assign]

    def _step(self, step: TrainStep, iteration: int, make: Callable[[], StepResult]) -> StepResult:
        if iteration == 1:
            modules = [module for chunk in step.model.chunks.values() for module in chunk.modules()]
            hooks = [module.register_forward_hook(lambda module, *_: self._called.append(module)) for module in modules]
            result = make()
            for hook in hooks:
                hook.remove()
            return result
        self._iteration = iteration
        flip = self._flips[iteration - 2]
        undo: list[Callable[[], None]] = []
        if flip.rank == self._rank:
            undo = list(self._plant(step, flip, random.Random(flip.seed)))

        def back(result: StepResult) -> None:
            for one in undo:
                one()

        step.before_update_hooks.append(back)  # behind the sentinel's comparison
        result = make()
        step.before_update_hooks.remove(back)
        return result

    def _plant(self, step: TrainStep, flip: Flip, draw: random.Random) -> Iterator[Callable[[], None]]:
        """Plant a flip, and give what takes it back."""
        if flip.kind == "activations":
            yield self._in_activation(step, flip, draw)
        elif flip.kind == "gradients":
            yield self._in_gradient(step, flip, draw)
        else:
            shards = step.optimizer.shards
            if flip.kind == "weights":
                alone = {shard.record.name: shard.weights for shard in shards if shard.is_fully_sharded}
                whole = [entry.param.data for entry in step.model.params if entry.record.name not in alone]
                tensors = [*alone.values(), *whole]
            else:
                apart = [shard.main_param for shard in shards if shard.main_param.data_ptr() != shard.weights.data_ptr()]
                tensors = [*apart, *(moment for shard in shards for moment in shard.moments.values())]
            tensors = [tensor for tensor in tensors if tensor.numel() and tensor.is_contiguous()]
            (tensor,) = draw.choices(tensors, [tensor.numel() for tensor in tensors])
            element = draw.randrange(tensor.numel())
            flip_bit(tensor, element, flip.bit)
            self._made()
            yield lambda: flip_bit(tensor, element, flip.bit)

    def _in_activation(self, step: TrainStep, flip: Flip, draw: random.Random) -> Callable[[], None]:
        """In what a module of the first microbatch gives."""

        def changed(module: nn.Module, args: Any, out: Any) -> None:
            op = step.executor.current_op
            first = op is not None and op.microbatch == 0 and op.type is OpType.FORWARD
            if first and isinstance(out, torch.Tensor) and out.is_floating_point() and out.is_contiguous():
                hook.remove()
                flip_bit(out, draw.randrange(out.numel()), flip.bit)
                self._made()

        hook = draw.choice(self._called).register_forward_hook(changed)
        return hook.remove

    def _in_gradient(self, step: TrainStep, flip: Flip, draw: random.Random) -> Callable[[], None]:
        """In a gradient of the first microbatch, as it is written."""
        wrote, at = self._wrote, draw.randrange(len(step.model.params))

        def changed(sink: GradSink) -> None:
            nonlocal at
            if at == 0 and sink.main_grad is not None:
                flip_bit(sink.main_grad, draw.randrange(sink.main_grad.numel()), flip.bit)
                self._made()
            at -= 1
            wrote(sink)

        GradSink._finish_write = changed  # type: ignore[assignment, method-assign]

        def back() -> None:
            GradSink._finish_write = wrote  # type: ignore[method-assign]

        return back

    def _made(self) -> None:
        with self._log.open("a") as file:
            file.write(f"{self._iteration}\n")


def run_flips(layout: str, flips: Sequence[Flip], **changes: Any) -> list[Outcome]:
    """Make these flips, each in a step of its own of runs that go on. Those that hit nothing are left out."""
    ranks, flags = LAYOUTS[layout]
    sizes = {axis: flags.get(f"{word}_model_parallel_size", 1) for axis, word in (("tp", "tensor"), ("pp", "pipeline"))}
    topology = Topology.from_world(ranks, **sizes, ep=flags.get("expert_model_parallel_size", 1))
    outcomes: list[Outcome] = []
    at = 0
    while at < len(flips):
        some = flips[at:]
        with tempfile.TemporaryDirectory() as name:
            metrics, made = Path(name) / "metrics", Path(name) / "made"
            settings = {
                "train_iters": len(some) + 1,
                "hidden_dropout": 0.1,
                "lr": 1e-4,
                "sentinel_interval": 1,
                "sentinel_action": "warn",
                "metrics_file": metrics,
                **flags,
                **changes,
            }

            def before(rank: int, some: Sequence[Flip] = some, made: Path = made) -> None:
                Injector(rank, some, made)

            ended = launch(arguments(**settings), ranks, before=before, timeout=120 + 10 * len(some))
            first, *lines = [line for line in read_metrics(metrics) if "sentinel_differences" in line]
            assert not first["sentinel_differences"], "nothing was flipped yet"
            assert len(lines) == len(some) or "not finite" in ended[0].stderr, report(ended)
            hits = {int(word) for word in made.read_text().split()} if made.exists() else set()
            outcomes += [
                _outcome(flip, line, topology)
                for iteration, (flip, line) in enumerate(zip(some, lines, strict=False), 2)
                if iteration in hits
            ]
            if len(lines) < len(some):
                outcomes.append(Outcome(some[len(lines)], found=False, named=False, ended=True))
            at += len(lines) + 1
    return outcomes


def _outcome(flip: Flip, line: dict[str, Any], topology: Topology) -> Outcome:
    found, named = bool(line["sentinel_differences"]), int(line["sentinel_rank"])
    parties = [
        number for rank in (named, flip.rank) for number, ranks in enumerate(build_model_replicas(topology)) if rank in ranks
    ]
    right = named >= 0 and parties[0] == parties[1]
    assert found or named < 0
    return Outcome(flip, found, right, ended=False)


def draw_flips(layout: str, count: int, seed: int) -> list[Flip]:
    """As many flips of each bit of each kind, in random order."""
    draw, ranks = random.Random(f"{layout} {seed}"), LAYOUTS[layout][0]
    flips = [Flip(kind, bit, draw.randrange(ranks), draw.getrandbits(32)) for kind in KINDS for bit in BITS for _ in range(count)]
    draw.shuffle(flips)
    return flips


def table(rows: Mapping[str, Sequence[Outcome]], column: Callable[[Outcome], str], columns: Sequence[str]) -> str:
    """A table in Markdown: found / made in each cell."""

    def cell(outcomes: Sequence[Outcome]) -> str:
        live = [one for one in outcomes if not one.ended]
        return f"{sum(one.found for one in live)} / {len(live)}"

    lines = [f"| | {' | '.join(columns)} | names the right one | not finite |", "|---|" + "---|" * (len(columns) + 2)]
    for name, outcomes in rows.items():
        found = [one for one in outcomes if one.found]
        cells = [cell([one for one in outcomes if column(one) == wanted]) for wanted in columns]
        cells += [f"{sum(one.named for one in found)} / {len(found)}", str(sum(one.ended for one in outcomes))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead(microbatches: int, steps: int = 12) -> tuple[float, float]:
    """The processor time of a step of two data ranks without comparison, and what one adds: seconds of the first rank.

    Args:
        microbatches: of each data rank.
    """
    shape = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 4000}
    settings = {**shape, "micro_batch_size": 2, "global_batch_size": 4 * microbatches, "train_iters": steps, "bf16": True}
    least = []
    for interval in (None, 1):
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "seconds"

            def before(rank: int, file: Path = file) -> None:
                advance, took = Loop.run_step, list[float]()

                def timed(loop: Loop, *args: Any) -> Any:
                    began = time.process_time()
                    result = advance(loop, *args)
                    took.append(time.process_time() - began)
                    file.write_text(str(min(took)))
                    return result

                if rank == 0:
                    Loop.run_step = timed  # type: ignore[assignment, method-assign]

            argv = arguments(**settings, sentinel_interval=interval, use_distributed_optimizer=True)
            run(argv, 2, before=before, timeout=600)
            least.append(float(file.read_text()))
    return least[0], least[1] - least[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Make flips at all layouts, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=5, help="of each bit of each kind at each layout")
    parser.add_argument("--only", choices=LAYOUTS, help="one layout")
    parser.add_argument("--overhead", action="store_true", help="the cost of a comparison instead")
    args = parser.parse_args(argv)
    if args.overhead:
        for microbatches in (2, 8):
            step, more = overhead(microbatches)
            print(f"{microbatches} microbatches: a step takes {step:.3f} s, a comparison {more:.3f} s more, {more / step:.1%}")
        return
    found: dict[str, list[Outcome]] = {}
    for layout in [args.only] if args.only else LAYOUTS:
        found[layout] = run_flips(layout, draw_flips(layout, args.flips, seed=1))
        print(f"{layout}: {len(found[layout])} flips", file=sys.stderr, flush=True)
    print(table(found, lambda one: one.flip.kind, KINDS), end="\n\n")
    everything = [one for outcomes in found.values() for one in outcomes]
    print(table({bit: [one for one in everything if one.flip.bit == bit] for bit in BITS}, lambda one: one.flip.kind, KINDS))


if __name__ == "__main__":
    main()
