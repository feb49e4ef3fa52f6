"""The forward of the first step: the first module that gives something else, then the loss and the count of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.verification.comparison import Comparison, FindingKind, ProofFinding
from megatron.verification.joined import GROUP_WORDS, constant_ratio, norm
from megatron.verification.observation import Activation, RankObservation
from megatron.verification.wording import TOLERANCE, forward_order, layer_of, listing, ratio_words, relative


@dataclass(frozen=True)
class _Seen:
    """An activation on a rank, beside the reference's."""

    rank: RankObservation
    activation: Activation
    wanted: torch.Tensor

    @property
    def differs(self) -> bool:
        return not norm(self.activation.values - self.wanted) <= TOLERANCE * norm(self.wanted)

    @property
    def relative(self) -> float:
        return relative(norm(self.activation.values - self.wanted), norm(self.wanted))


def forward_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """The first module, in the order of the forward, that is not computed once or gives something else."""
    for name in forward_order(runs.observation.config.model.num_layers):
        if name not in runs.plain.activations:
            continue
        seen = _seen(runs, name)
        found = _wrong_times(runs, name, seen) or _wrong_values(runs, name, seen)
        if found is not None:
            yield found
            return


def loss_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """The count of tokens, the sum of the loss, and their quotient in the step of this index."""
    mine, plain = runs.steps(index)
    facts = runs.facts(index)
    samples = facts.tokens // runs.observation.config.model.seq_length
    if samples != plain.num_samples:
        text = f"the step takes {samples} samples, and should take {plain.num_samples}: the batch size, or its ramp-up"
        far = relative(samples - plain.num_samples, plain.num_samples)
        yield ProofFinding(FindingKind.COUNT, plain.iteration, "the global batch", text, far)
        return
    counted = sum(rank.steps[index].token_count for rank in runs.ranks)
    summed = sum(rank.steps[index].loss_sum for rank in runs.ranks)
    if differ(counted, plain.token_count):
        text = (
            f"{counted:,.0f} tokens are counted, the loss masks keep {plain.token_count:,.0f} of {facts.tokens:,}: "
            f"{_count_words(counted, plain.token_count, facts.tokens)}; the loss and every gradient are divided by the wrong number"
        )
        yield ProofFinding(
            FindingKind.COUNT, plain.iteration, "the global batch", text, relative(counted - plain.token_count, plain.token_count)
        )
    if differ(summed, plain.loss_sum):
        ratio = ratio_words(summed / plain.loss_sum, facts) if math.isfinite(summed) else "not finite"
        text = f"the sum of the loss over the tokens is {summed:.12g}, the reference's {plain.loss_sum:.12g} ({ratio})"
        if index == 0:
            text += "; all layers agree, so it is the final norm, the output layer, the cross entropy, labels or masks"
        else:
            text += "; the weights are right, so it is the samples, or values of parameters that are used before they arrive"
        place = runs.place("output")
        yield ProofFinding(FindingKind.LOSS, plain.iteration, place, text, relative(summed - plain.loss_sum, plain.loss_sum))
    elif differ(mine.loss, plain.loss):
        ratio = ratio_words(mine.loss / plain.loss, facts) if math.isfinite(mine.loss) else "not finite"
        text = f"the mean loss is {mine.loss:.12g}, the reference's {plain.loss:.12g}: {ratio}"
        yield ProofFinding(
            FindingKind.LOSS, plain.iteration, "the global batch", text, relative(mine.loss - plain.loss, plain.loss)
        )
    told = {rank.steps[index].loss for rank in runs.ranks}
    if len(told) > 1 and all(map(math.isfinite, told)):
        text = f"ranks report {len(told)} different losses: {', '.join(f'{loss:.12g}' for loss in sorted(told)[:3])}"
        yield ProofFinding(
            FindingKind.LOSS, plain.iteration, "the ranks' reports", text, relative(max(told) - min(told), plain.loss)
        )


def differ(found: float, wanted: float) -> bool:
    """Whether two numbers are apart by more than rounding."""
    return not abs(found - wanted) <= TOLERANCE * abs(wanted)


def _count_words(counted: float, kept: float, tokens: int) -> str:
    if counted == tokens:
        return "the count ignores the loss mask"
    times = counted / kept
    return f"{times:.6g} times what it should be"


def _seen(runs: Comparison, name: str) -> list[_Seen]:
    whole = runs.plain.activations[name]
    found = []
    for rank in runs.ranks:
        for each in rank.activations:
            if each.name == name:
                samples, positions = each.values.shape[:2]
                wanted = whole[
                    each.first_sample : each.first_sample + samples, each.first_position : each.first_position + positions
                ]
                found.append(_Seen(rank, each, wanted))
    return found


def _wrong_times(runs: Comparison, name: str, seen: Sequence[_Seen]) -> ProofFinding | None:
    """Each data rank computes each of its microbatches once, on each rank of one tensor group."""
    times: dict[tuple[int, int], int] = {}
    for rank in runs.ranks:
        times |= {(rank.coordinates["dp"], microbatch): 0 for microbatch in range(rank.steps[0].num_microbatches)}
    for each in seen:
        if each.rank.coordinates["tp"] == 0:
            at = each.rank.coordinates["dp"], each.activation.microbatch
            times[at] = times.get(at, 0) + 1
    wrong = [at for at, count in times.items() if count != 1]
    if not wrong:
        return None
    if all(times[at] == 0 for at in times):
        text = "it is never computed: dropped from the forward"
    else:
        data_rank, microbatch = wrong[0]
        counts = listing(times[at] for at in wrong)
        text = f"computed {counts} times instead of once (microbatch {microbatch} of data rank {data_rank} is the first such)"
    return ProofFinding(FindingKind.FORWARD, _first(runs), runs.place(name), text, math.inf, (name,), runs.stages(name))


def _wrong_values(runs: Comparison, name: str, seen: Sequence[_Seen]) -> ProofFinding | None:
    wrong = [each for each in seen if each.differs]
    if not wrong:
        return None
    stages = sorted({each.rank.coordinates["pp"] for each in wrong})
    notes = [f"{_part_words(name)} differs, though all before it agrees"]
    notes += _sum_words(wrong)
    notes += _factor_words(runs, wrong) or _position_words(name, wrong)
    notes += _share_words(seen, wrong)
    notes += _boundary_words(runs, name)
    group = "tensor" if _tensor_ranks_differ(wrong) else ""
    ranks = sorted({each.rank.rank for each in wrong})
    everyone = {each.rank.rank for each in seen}
    return ProofFinding(
        FindingKind.FORWARD,
        _first(runs),
        runs.place(name),
        "; ".join(notes),
        max(each.relative for each in wrong),
        (name,),
        tuple(stages),
        group,
        tuple(ranks) if set(ranks) != everyone else (),
    )


def _part_words(name: str) -> str:
    part = name.rpartition(".")[2]
    if name == "embedding":
        return "what the embedding gives"
    return {"attention": "what the attention gives", "mlp": "what the MLP gives"}.get(part, "the residual stream behind the layer")


def _groups(wrong: Sequence[_Seen]) -> list[list[_Seen]]:
    """Those of the same positions of the same microbatch, on the tensor ranks."""
    sets: dict[tuple[int, int], list[_Seen]] = {}
    for each in wrong:
        sets.setdefault((each.activation.first_sample, each.activation.first_position), []).append(each)
    return [same for same in sets.values() if len(same) > 1]


def _tensor_ranks_differ(wrong: Sequence[_Seen]) -> bool:
    return any(not torch.equal(same[0].activation.values, each.activation.values) for same in _groups(wrong) for each in same)


def _sum_words(wrong: Sequence[_Seen]) -> list[str]:
    groups = _groups(wrong)
    if not groups or not _tensor_ranks_differ(wrong):
        return []
    with_bias = False
    for same in groups:
        wanted = same[0].wanted
        left = torch.stack([each.activation.values for each in same]).sum(dim=0) - wanted
        if norm(left) <= 1e3 * TOLERANCE * norm(wanted):
            continue
        with_bias = True
        if not norm(left - left[:1, :1]) <= 1e3 * TOLERANCE * norm(wanted):  # not one vector that is added to all tokens
            return ["the tensor ranks hold different values"]
    but = ", but for a bias that each of them adds" if with_bias else ""
    return [
        f"the tensor ranks hold different values whose sum is right{but}: the sum over the {GROUP_WORDS['tp']} group is missing"
    ]


def _factor_words(runs: Comparison, wrong: Sequence[_Seen]) -> list[str]:
    ratios = [constant_ratio(each.activation.values, each.wanted) for each in wrong]
    if any(ratio is None for ratio in ratios) or ratios[0] is None:
        return []
    same = all(ratio is not None and math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios)
    return [ratio_words(ratios[0], runs.facts(0))] if same else []


def _position_words(name: str, wrong: Sequence[_Seen]) -> list[str]:
    """Which tokens of the samples differ. The first attends to itself alone, so queries and keys do not matter to it."""
    places: set[int] = set()
    looked: set[int] = set()
    for each in wrong:
        apart = (each.activation.values - each.wanted).norm(dim=2) / each.wanted.norm(dim=2).clamp(min=1e-300)
        bad = (~(apart <= 10 * TOLERANCE)).any(dim=0).nonzero().flatten().tolist()
        places |= {each.activation.first_position + position for position in bad}
        looked |= set(range(each.activation.first_position, each.activation.first_position + each.wanted.shape[1]))
    if not places or places == looked:
        return []
    text = f"positions {listing(places)} differ, the others agree"
    if name.endswith(".attention") and 0 in looked - places:
        text += (
            " (the first token of a sample attends to itself alone, and is right: so are values and projections; "
            "queries and keys are not: rotary positions, the scale or the mask)"
        )
    return [text]


def _share_words(seen: Sequence[_Seen], wrong: Sequence[_Seen]) -> list[str]:
    """On which ranks and for which microbatches, where not on all."""
    notes = []
    for axis, word in (("tp", "tensor rank"), ("dp", "data rank")):
        bad, all_of = ({each.rank.coordinates[axis] for each in those} for those in (wrong, seen))
        if bad != all_of:
            notes.append(f"only on {word} {listing(bad)}")
    bad, all_of = ({each.activation.microbatch for each in those} for those in (wrong, seen))
    if bad != all_of:
        notes.append(f"only in microbatch {listing(bad)}")
    return notes


def _boundary_words(runs: Comparison, name: str) -> list[str]:
    layer = layer_of(name)
    if layer is None or not name.endswith(".attention"):
        return []
    for chunk in runs.table:
        if not chunk.first and len(chunk.layers) and chunk.layers.start == layer:
            sender = runs.table[chunk.index - 1].stage
            return [f"it is the first layer of its chunk, so what arrived from stage {sender} may be wrong too"]
    return []


def _first(runs: Comparison) -> int:
    return runs.plain.steps[0].iteration
