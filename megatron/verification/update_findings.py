"""What follows the gradients: the norm that clips them, the update, the weights that the model gets, and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.verification.comparison import ComparedTensors, Comparison, FindingKind, ProofFinding
from megatron.verification.forward_findings import differ
from megatron.verification.gradient_findings import likewise
from megatron.verification.joined import constant_ratio, cut, norm
from megatron.verification.wording import TOLERANCE, Facts, listing, ratio_words, relative

LISTED = 4


def norm_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the global norm of a step whose gradients agree: each element must be counted once."""
    mine, plain = runs.steps(index)
    if not differ(mine.grad_norm, plain.grad_norm):
        return
    wrong = _miscounted(runs, index)
    far = relative(mine.grad_norm - plain.grad_norm, plain.grad_norm)
    text = f"{mine.grad_norm:.12g}, the reference's {plain.grad_norm:.12g}"
    if wrong:
        told = [f"{name} {words}" for name, words in list(wrong.items())[:LISTED]]
        told += [f"and {len(wrong) - LISTED} others"] if len(wrong) > LISTED else []
        text += f": {', '.join(told)}; clipping takes its factor from this norm"
    else:
        squares = (mine.grad_norm / plain.grad_norm) ** 2 if plain.grad_norm else math.inf
        text += f", though each element is counted once: the sum of squares over the world is {squares:.6g} times what it should be"
    yield runs.finding(FindingKind.NORM, index, list(wrong) or "all parameters", text, far)


def _miscounted(runs: Comparison, index: int) -> dict[str, str]:
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
    found = {}
    for name, count in counts.items():
        fewest, most = int(count.min()), int(count.max())
        wanted = norm(runs.plain.steps[index].gradients[name]) ** 2
        if most > 1:
            found[name] = f"is counted {most} times" + ("" if fewest == most else " in part")
        elif fewest < 1:
            found[name] = "is not counted" + ("" if most == 0 else " in part")
        elif abs(squares[name] - wanted) > 1e-6 * runs.plain.steps[index].grad_norm ** 2:
            found[name] = f"has a sum of squares of {squares[name]:.6g} instead of {wanted:.6g}"
    return found


def update_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the weights after a step whose gradients and norm agree."""
    mine, plain = runs.steps(index)
    everything = "all parameters"
    if mine.skipped:
        text = "the step was skipped: the loss scaler took the gradient for an overflow"
        yield runs.finding(FindingKind.UPDATE, index, everything, text)
        return
    for what in ("learning_rate", "weight_decay"):
        found, wanted = getattr(mine, what), getattr(plain, what)
        if differ(found, wanted):
            text = f"the {what.replace('_', ' ')} is {found:.9g}, the schedule says {wanted:.9g}"
            yield runs.finding(FindingKind.UPDATE, index, everything, text, relative(found - wanted, wanted))
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
    before = (runs.weights(index - 1).reference if index else runs.observation.start)[first]
    change, wanted = compared.joined[first].tensor - before, compared.reference[first] - before
    ratio, decay = constant_ratio(change, wanted), constant_ratio(change - wanted, before)
    if not change.any():
        words = "the weights are as before: no update reached them"
    elif ratio is not None:
        words = f"the change is {ratio_words(ratio, Facts())}"  # sums over groups are right, since the gradient is
    elif decay is not None and abs(decay) > 1e-12:
        words = f"it is too far by {decay:.6g} times the weights before: weight decay acts on it otherwise than it should"
    else:
        words = f"differs by no constant factor ({compared.measured[first].words()}): clipping, moments or the update rule"
    text = f"the gradient is right, the update is not: {words}{likewise(names, LISTED)}"
    return runs.finding(FindingKind.UPDATE, index, names, text, max(compared.measured[name].relative for name in names))


def _published(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences between the parameters that the next forward uses and what the optimizer holds."""
    compared = runs.parameters(index)
    if stale := compared.differing[::-1]:
        held = runs.weights(index).joined[stale[0]].tensor
        wrong = [each for each in compared.joined[stale[0]].held if not torch.equal(each.part.values, cut(held, each.part))]
        text = (
            "the optimizer holds the right values, but the next forward uses others: the update was not carried to the parameters "
            f"({compared.measured[stale[0]].words()})"
        )
        worst = max(compared.measured[name].relative for name in stale)
        yield runs.finding(FindingKind.REPLICAS, index, stale, text, worst, ranks=[each.rank for each in wrong])


def _replicas(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Weights that differ between ranks that hold the same: they must have the same bits, or they would drift."""
    for compared, what in ((runs.weights(index), "main parameters"), (runs.parameters(index), "parameters")):
        for name, joined in compared.joined.items():
            for replicas in joined.ranks_apart()[:1]:
                text = (
                    f"{what} that several ranks hold are not the same bits on ranks {listing(replicas.ranks)} of a "
                    f"{replicas.group} group: they will drift apart"
                )
                apart, ranks = replicas.apart(), replicas.ranks
                yield runs.finding(FindingKind.REPLICAS, index, [name], text, apart, group=replicas.group, ranks=ranks)
                return


def overwritten_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Tensors that a step wrote to while they were being sent. Here other ranks got the old content; on a cluster it is chance."""
    found = {rank.rank: rank.steps[index].overwritten for rank in runs.ranks if rank.steps[index].overwritten}
    if found:
        places = next(iter(found.values()))
        text = f"it was written to before it had left, so that chance decides what arrives{likewise(places, 3)}"
        yield runs.finding(FindingKind.TRANSFER, index, places[0], text, ranks=list(found))


def evaluation_findings(runs: Comparison, up_to: int) -> Iterator[ProofFinding]:
    """Differences in evaluations with weights that agree.

    Args:
        up_to: number of steps after which the weights still agree.
    """
    both = zip(runs.ranks[0].evaluations[: up_to + 1], runs.plain.evaluations, strict=False)
    for number, (a, b) in enumerate(both):
        if differ(a, b):
            why = "not finite" if not math.isfinite(a) else ratio_words(a / b, runs.facts(0))
            if "," not in why and math.isfinite(a):  # no fact of the layout
                why = (
                    "dropout is on where it should be off, parameters are used before they arrive, or the batches, their masks or "
                    "their count are others than in training"
                )
            text = (
                f"the mean loss of an evaluation is {a:.12g}, the reference's {b:.12g}, though training with the same weights "
                f"agrees: {why}"
            )
            after = number - 1 if number else None
            yield runs.finding(FindingKind.EVALUATION, after, "the held-out batches", text, relative(a - b, b))
            return
