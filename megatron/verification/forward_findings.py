"""The forward of the first step: the first module with another output, then the loss and the count of tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.verification.comparison import Comparison, FindingKind, ProofFinding
from megatron.verification.joined import HeldPart, JoinedTensor, constant_ratio, cut, near, norm
from megatron.verification.wording import TOLERANCE, forward_order, layer_of, listing, ratio_words, relative

_PARTS = {"embedding": "what the embedding gives", "attention": "what the attention gives", "mlp": "what the MLP gives"}


def forward_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """The first module, in the order of the forward, that is not computed once or has another output."""
    seen = runs.activations()
    for name in forward_order(runs.observation.config.model.num_layers):
        if (whole := runs.plain.activations.get(name)) is not None:
            joined = seen.get(name, JoinedTensor(name, ()))
            found = _wrong_times(runs, joined) or _wrong_values(runs, joined, whole)
            if found is not None:
                yield found
                return


def loss_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the count of tokens, the sum of the loss and their quotient, in the step of this index."""
    mine, plain = runs.steps(index)
    facts = runs.facts(index)
    batch = "the global batch"
    samples = facts.tokens // runs.observation.config.model.seq_length
    if samples != plain.num_samples:
        text = f"the step takes {samples} samples, and should take {plain.num_samples}: the batch size, or its ramp-up"
        yield runs.finding(FindingKind.COUNT, index, batch, text, relative(samples - plain.num_samples, plain.num_samples))
        return
    counted = sum(rank.steps[index].token_count for rank in runs.ranks)
    summed = sum(rank.steps[index].loss_sum for rank in runs.ranks)
    if differ(counted, plain.token_count):
        ignored = counted == facts.tokens
        why = "the count ignores the loss mask" if ignored else f"{counted / plain.token_count:.6g} times what it should be"
        text = (
            f"{counted:,.0f} tokens are counted, the loss masks keep {plain.token_count:,.0f} of {facts.tokens:,}: {why}; the loss "
            "and every gradient are divided by the wrong number"
        )
        yield runs.finding(FindingKind.COUNT, index, batch, text, relative(counted - plain.token_count, plain.token_count))
    if differ(summed, plain.loss_sum):
        ratio = ratio_words(summed / plain.loss_sum, facts) if math.isfinite(summed) else "not finite"
        text = f"the sum of the loss over the tokens is {summed:.12g}, the reference's {plain.loss_sum:.12g} ({ratio})"
        if index == 0:
            text += "; all layers agree, so it is the final norm, the output layer, the cross entropy, labels or masks"
        else:
            text += "; the weights are right, so it is the samples, or values of parameters that are used before they arrive"
        far = relative(summed - plain.loss_sum, plain.loss_sum)
        yield runs.finding(FindingKind.LOSS, index, runs.place("output"), text, far)
    elif differ(mine.loss, plain.loss):
        ratio = ratio_words(mine.loss / plain.loss, facts) if math.isfinite(mine.loss) else "not finite"
        text = f"the mean loss is {mine.loss:.12g}, the reference's {plain.loss:.12g}: {ratio}"
        yield runs.finding(FindingKind.LOSS, index, batch, text, relative(mine.loss - plain.loss, plain.loss))
    told = {rank.steps[index].loss for rank in runs.ranks}
    if len(told) > 1 and all(map(math.isfinite, told)):
        text = f"ranks report {len(told)} different losses: {', '.join(f'{loss:.12g}' for loss in sorted(told)[:3])}"
        yield runs.finding(FindingKind.LOSS, index, "the ranks' reports", text, relative(max(told) - min(told), plain.loss))


def differ(found: float, wanted: float) -> bool:
    """Whether two numbers differ by more than rounding."""
    return not abs(found - wanted) <= TOLERANCE * abs(wanted)


def _wrong_times(runs: Comparison, joined: JoinedTensor) -> ProofFinding | None:
    """Check that each data rank computes each of its microbatches once, on each rank of one tensor group."""
    times = Counter(_microbatch(runs, each) for each in joined.held if each.coordinates["tp"] == 0)
    wrong = [place for place in runs.plain.microbatches if times[place] != 1]
    if not wrong:
        return None
    text = "it is never computed: dropped from the forward"
    if times:
        counts = listing(times[place] for place in wrong)
        data_rank, number = min(wrong)
        text = f"computed {counts} times instead of once (microbatch {number} of data rank {data_rank} is the first such)"
    return runs.finding(FindingKind.FORWARD, 0, [joined.name], text)


def _wrong_values(runs: Comparison, joined: JoinedTensor, whole: Tensor) -> ProofFinding | None:
    far = [relative(norm(each.part.values - (of := cut(whole, each.part))), norm(of)) for each in joined.held]
    wrong = [each for each, apart in zip(joined.held, far, strict=True) if not apart <= TOLERANCE]
    if not wrong:
        return None
    name = joined.name
    differing = JoinedTensor(name, tuple(wrong)).ranks_apart()
    notes = [
        f"{_PARTS.get(name.rpartition('.')[2], 'the residual stream behind the layer')} differs, though all before it agrees",
        *_sum_words(JoinedTensor(name, tuple(wrong)), whole),
        *(_factor_words(runs, wrong, whole) or _position_words(name, wrong, whole)),
        *_share_words(runs, joined.held, wrong),
        *_boundary_words(runs, name),
    ]
    ranks = sorted({each.rank for each in wrong})
    return runs.finding(
        FindingKind.FORWARD,
        0,
        [name],
        "; ".join(notes),
        max(far),
        group=differing[0].group if differing else "",
        ranks=ranks if set(ranks) != {each.rank for each in joined.held} else (),
    )


def _microbatch(runs: Comparison, held: HeldPart) -> tuple[int, int]:
    """Data rank and index of the microbatch of a part."""
    return runs.plain.microbatches[held.part.offsets[0] // runs.observation.config.training.micro_batch_size]


def _sum_words(wrong: JoinedTensor, whole: Tensor) -> list[str]:
    """Words if the tensor ranks' parts add up to what each should hold, or do so but for one vector that is added to all tokens."""
    if not wrong.ranks_apart():
        return []
    with_bias = False
    for replicas in wrong.replicas():
        wanted = cut(whole, replicas.held[0].part)
        if not near(replicas.sum(), wanted):
            left = replicas.sum() - wanted
            with_bias = True
            if not norm(left - left[:1, :1]) <= 1e3 * TOLERANCE * norm(wanted):
                return ["the tensor ranks hold different values"]
    but = ", but for a bias that each of them adds" if with_bias else ""
    return [f"the tensor ranks hold different values whose sum is right{but}: the sum over the tensor group is missing"]


def _factor_words(runs: Comparison, wrong: Sequence[HeldPart], whole: Tensor) -> list[str]:
    first = constant_ratio(wrong[0].part.values, cut(whole, wrong[0].part))
    same = first is not None and all(each.near(first * whole) for each in wrong)
    return [ratio_words(first, runs.facts(0))] if same and first is not None else []


def _position_words(name: str, wrong: Sequence[HeldPart], whole: Tensor) -> list[str]:
    """Words on which tokens of the samples differ. The first token attends to itself alone, so queries and keys do not matter."""
    places: set[int] = set()
    looked: set[int] = set()
    for each in wrong:
        wanted, first = cut(whole, each.part), each.part.offsets[1]
        apart = (each.part.values - wanted).norm(dim=2) / wanted.norm(dim=2).clamp(min=1e-300)
        bad = (~(apart <= 10 * TOLERANCE)).any(dim=0).nonzero().flatten().tolist()
        places |= {first + position for position in bad}
        looked |= set(range(first, first + wanted.shape[1]))
    if not places or places == looked:
        return []
    text = f"positions {listing(places)} differ, the others agree"
    if name.endswith(".attention") and 0 in looked - places:
        text += (
            " (the first token of a sample attends to itself alone, and is right: so are values and projections; "
            "queries and keys are not: rotary positions, the scale or the mask)"
        )
    return [text]


def _share_words(runs: Comparison, held: Sequence[HeldPart], wrong: Sequence[HeldPart]) -> list[str]:
    """Words on the ranks and microbatches that differ, if not all do."""
    notes = []
    for place, of in (
        ("on tensor rank", lambda each: each.coordinates["tp"]),
        ("on data rank", lambda each: each.coordinates["dp"]),
        ("in microbatch", lambda each: _microbatch(runs, each)[1]),
    ):
        bad = {of(each) for each in wrong}
        if bad != {of(each) for each in held}:
            notes.append(f"only {place} {listing(bad)}")
    return notes


def _boundary_words(runs: Comparison, name: str) -> list[str]:
    for chunk in runs.table if name.endswith(".attention") else ():
        if not chunk.first and len(chunk.layers) and chunk.layers.start == layer_of(name):
            sender = runs.table[chunk.index - 1].stage
            return [f"it is the first layer of its chunk, so what arrived from stage {sender} may be wrong too"]
    return []
