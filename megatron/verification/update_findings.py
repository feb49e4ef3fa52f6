"""After the gradients: the norm that clips them, the update, what the model gets of it, and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.verification.comparison import ComparedTensors, Comparison, FindingKind, ProofFinding
from megatron.verification.forward_findings import differ
from megatron.verification.joined import GROUP_WORDS, constant_ratio, cut, norm
from megatron.verification.wording import TOLERANCE, Facts, listing, ratio_words, relative

LISTED = 4


def norm_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """The global gradient norm of a step whose gradients agree: each element is to be counted once."""
    mine, plain = runs.steps(index)
    if not differ(mine.grad_norm, plain.grad_norm):
        return
    wrong = _miscounted(runs, index)
    names = tuple(name for name, _ in wrong)
    far = relative(mine.grad_norm - plain.grad_norm, plain.grad_norm)
    text = f"{mine.grad_norm:.12g}, the reference's {plain.grad_norm:.12g}"
    if not wrong:
        squares = (mine.grad_norm / plain.grad_norm) ** 2 if plain.grad_norm else math.inf
        text += f", though each element is counted once: the sum of squares over the world is {squares:.6g} times what it should be"
        yield ProofFinding(FindingKind.NORM, plain.iteration, "all parameters", text, far)
        return
    told = [f"{name} {words}" for name, words in wrong[:LISTED]]
    told += [f"and {len(wrong) - LISTED} others"] if len(wrong) > LISTED else []
    text += f": {', '.join(told)}; clipping takes its factor from this norm"
    yield ProofFinding(FindingKind.NORM, plain.iteration, runs.place(names[0]), text, far, names, runs.stages(names[0]))


def _miscounted(runs: Comparison, index: int) -> list[tuple[str, str]]:
    """Parameters whose elements are not each counted once, with what happens instead."""
    counts: dict[str, Tensor] = {
        name: torch.zeros(wanted.shape, dtype=torch.int64) for name, wanted in runs.plain.steps[index].gradients.items()
    }
    squares = dict.fromkeys(counts, 0.0)
    for rank in runs.ranks:
        for each in rank.steps[index].counted_squares:
            if each.name in counts:
                squares[each.name] += each.square
                for offsets, sizes in each.boxes:
                    counts[each.name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    found = []
    for name, count in counts.items():
        fewest, most = int(count.min()), int(count.max())
        wanted = norm(runs.plain.steps[index].gradients[name]) ** 2
        if most > 1:
            found.append((name, f"is counted {most} times" + ("" if fewest == most else " in part")))
        elif fewest < 1:
            found.append((name, "is not counted" + ("" if most == 0 else " in part")))
        elif abs(squares[name] - wanted) > 1e-6 * runs.plain.steps[index].grad_norm ** 2:
            found.append((name, f"has a sum of squares of {squares[name]:.6g} instead of {wanted:.6g}"))
    return found


def update_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """The weights after a step whose gradients and norm agree."""
    mine, plain = runs.steps(index)
    if mine.skipped:
        text = "the step was skipped: the loss scaler took the gradient for an overflow"
        yield ProofFinding(FindingKind.UPDATE, plain.iteration, "all parameters", text, math.inf)
        return
    for what in ("learning_rate", "weight_decay"):
        found, wanted = getattr(mine, what), getattr(plain, what)
        if differ(found, wanted):
            text = f"the {what.replace('_', ' ')} is {found:.9g}, the schedule says {wanted:.9g}"
            yield ProofFinding(FindingKind.UPDATE, plain.iteration, "all parameters", text, relative(found - wanted, wanted))
    compared = runs.weights(index)
    if compared.differing:
        apart = [finding for finding in _replicas(runs, index) if finding.relative > TOLERANCE]
        yield from apart or [_wrong_update(runs, index, compared)]
    else:
        yield from _published(runs, index)
        yield from _replicas(runs, index)


def _wrong_update(runs: Comparison, index: int, compared: ComparedTensors) -> ProofFinding:
    names = compared.differing[::-1]
    first = names[0]
    before = runs.weights(index - 1).reference if index else runs.observation.start
    change = compared.joined[first].tensor - before[first]
    wanted = compared.reference[first] - before[first]
    excess = change - wanted
    ratio = constant_ratio(change, wanted)
    if not change.any():
        words = "the weights are as before: no update reached them"
    elif ratio is not None:
        words = f"the change is {ratio_words(ratio, Facts())}"  # sums over groups are right: the gradient is
    elif (decay := constant_ratio(excess, before[first])) is not None and abs(decay) > 1e-12:
        words = f"it is too far by {decay:.6g} times the weights before: weight decay acts on it otherwise than it should"
    else:
        words = f"differs by no constant factor ({compared.measured[first].words()}): clipping, moments or the update rule"
    text = f"the gradient is right, the update is not: {words}"
    if len(names) > 1:
        text += f"; likewise {', '.join(names[1:LISTED])}" + (f" and {len(names) - LISTED} others" if len(names) > LISTED else "")
    worst = max(compared.measured[name].relative for name in names)
    iteration = runs.plain.steps[index].iteration
    return ProofFinding(FindingKind.UPDATE, iteration, runs.place(first), text, worst, tuple(names), runs.stages(first))


def _published(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Parameters that the next forward uses are what the optimizer holds."""
    compared = runs.parameters(index)
    stale = compared.differing[::-1]
    if not stale:
        return
    first = stale[0]
    held = runs.weights(index).joined[first].tensor
    wrong = [each for each in compared.joined[first].held if not torch.equal(each.part.values, cut(held, each.part))]
    text = (
        "the optimizer holds the right values, but the next forward uses others: the update was not carried to the parameters "
        f"({compared.measured[first].words()})"
    )
    worst = max(compared.measured[name].relative for name in stale)
    ranks = tuple(each.rank for each in wrong)
    yield ProofFinding(
        FindingKind.REPLICAS,
        runs.plain.steps[index].iteration,
        runs.place(first),
        text,
        worst,
        tuple(stale),
        runs.stages(first),
        ranks=ranks,
    )


def _replicas(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Weights held by several ranks are the same bits everywhere: rounding apart, they would drift."""
    for compared, what in ((runs.weights(index), "mains"), (runs.parameters(index), "parameters")):
        for name, joined in compared.joined.items():
            for replicas in joined.replicas():
                if not replicas.agree():
                    text = (
                        f"{what} that several ranks hold are not the same bits on ranks {listing(replicas.ranks)} of a "
                        f"{GROUP_WORDS[replicas.axis]} group: they will drift apart"
                    )
                    group = GROUP_WORDS[replicas.axis]
                    iteration = runs.plain.steps[index].iteration
                    yield ProofFinding(
                        FindingKind.REPLICAS,
                        iteration,
                        runs.place(name),
                        text,
                        replicas.apart(),
                        (name,),
                        runs.stages(name),
                        group,
                        replicas.ranks,
                    )
                    return


def overwritten_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """What a step wrote to while it was being sent. Here others got what was there before; elsewhere it is a matter of chance."""
    found = {rank.rank: rank.steps[index].overwritten for rank in runs.ranks if rank.steps[index].overwritten}
    if found:
        first, *others = next(iter(found.values()))
        text = "it was written to before it had left, so that chance decides what arrives"
        if others:
            text += f"; likewise {', '.join(others[:2])}" + (f" and {len(others) - 2} others" if len(others) > 2 else "")
        yield ProofFinding(FindingKind.TRANSFER, runs.plain.steps[index].iteration, first, text, math.inf, ranks=tuple(found))


def evaluation_findings(runs: Comparison, up_to: int) -> Iterator[ProofFinding]:
    """Evaluations with weights that agree.

    Args:
        up_to: number of steps after which the weights still agree.
    """
    found: Sequence[float] = runs.ranks[0].evaluations
    wanted: Sequence[float] = runs.plain.evaluations
    for number, (a, b) in enumerate(zip(found[: up_to + 1], wanted, strict=False)):
        if not differ(a, b):
            continue
        iteration = runs.plain.steps[number - 1].iteration if number else 0
        text = (
            f"the mean loss of an evaluation is {a:.12g}, the reference's {b:.12g}, though training with the same weights agrees: "
        )
        if not math.isfinite(a):
            text += "not finite"
        else:
            kept = ratio_words(a / b, runs.facts(0))
            text += (
                kept
                if "," in kept
                else "dropout is on where it should be off, parameters are used before they arrive, or the batches, their masks or "
                "their count are others than in training"
            )
        yield ProofFinding(FindingKind.EVALUATION, iteration, "the held-out batches", text, relative(a - b, b))
        return
