"""The differences between two runs, in the order in which one causes the next: start values, forward, loss, gradients, their norm,
the update, what the next forward is given, and evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from megatron.parallel.topology import GRADIENT_AXES
from megatron.pipeline_parallel.partition import Chunk
from megatron_lab.verification.causes import (
    LISTED,
    WrongTensor,
    left_over,
    likewise,
    microbatches_in,
    number_findings,
    sentence,
    tensor_findings,
    wrong_update,
)
from megatron_lab.verification.comparison import Comparison, FindingKind, ProofFinding
from megatron_lab.verification.joined import AXES, JoinedTensor, norm
from megatron_lab.verification.wording import (
    NEGLIGIBLE,
    TOLERANCE,
    forward_order,
    layer_of,
    listing,
    place_words,
    relative,
    stages_of,
)

_EVERYTHING = "all parameters"


# ---- before anything is computed


def start_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """Differences before the first step."""
    yield from layer_findings(runs.table, runs.config.model.num_layers, runs.observation.start)
    yield from _parameter_findings(runs)
    lead = "is not what the run was given: values are loaded or published wrongly"
    yield from tensor_findings(runs, None, FindingKind.START, runs.start, lead)
    lead = "is initialised to other values than in one process: initialisation depends on the layout"
    yield from tensor_findings(runs, None, FindingKind.INITIAL, runs.initial, lead)


def layer_findings(table: Sequence[Chunk], num_layers: int, parameters: Iterable[str] = ()) -> Iterator[ProofFinding]:
    """Check that the table gives each layer to one chunk, in order.

    Args:
        parameters: names of the model's parameters.
    """

    def finding(names: Sequence[str], text: str) -> ProofFinding:
        place, stages = place_words(names[0], table), tuple(stages_of(names[0], table))
        return ProofFinding(FindingKind.PARAMETERS, 0, place, text, math.inf, tuple(names), stages)

    for layer in range(num_layers):
        chunks = [chunk for chunk in table if layer in chunk.layers]
        if len(chunks) != 1:
            text = "the layer is dropped: the layer table gives it to no stage, so it is never computed and never trained"
            if chunks:
                text = f"the layer is doubled: chunks {listing(chunk.index for chunk in chunks)} both hold it"
            yield finding([f"layers.{layer}", *(each for each in parameters if layer_of(each) == layer)], text)
    for before, chunk in pairwise(chunk for chunk in sorted(table, key=lambda chunk: chunk.index) if chunk.layers):
        first, last = chunk.layers[0], before.layers[-1]
        if first <= last:
            behind = f"behind layer {last} of chunk {before.index}"
            text = f"the layers are out of order: chunk {chunk.index} begins with layer {first}, {behind}"
            yield finding([f"layers.{first}"], text)
            return


def _parameter_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """Check that each parameter is held whole, and no other is."""
    held, wanted = runs.start.joined, runs.observation.start
    for name in dict.fromkeys([*wanted, *held]):
        if layer_of(name) is not None and not stages_of(name, runs.table):
            continue  # a finding about the whole layer says it already
        text = ""
        if name not in wanted:
            text = "the model of these settings has no such parameter"
        elif name not in held:
            text = "no rank holds it"
        elif held[name].shapes != {tuple(wanted[name].shape)}:
            shapes = ", ".join(str(list(found)) for found in sorted(held[name].shapes))
            text = f"ranks take its whole shape for {shapes}; it is {list(wanted[name].shape)}"
        elif held[name].holes:
            text = f"no rank holds {held[name].holes:,} of its {wanted[name].numel():,} elements"
        if text:
            yield runs.finding(None, FindingKind.PARAMETERS, [name], text)


# ---- forward and loss


def _times_computed(runs: Comparison, joined: JoinedTensor) -> Counter[tuple[int, int]]:
    """How often each microbatch, as (data rank, number), was computed: by the tokens that one tensor rank of each pipeline has."""
    parallel = runs.config.parallel
    tokens = runs.config.model.seq_length // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)
    seen: Counter[tuple[int, int]] = Counter()
    for each in joined.held:
        if each.coordinates["tp"] == 0:
            seen[_microbatch(runs, each.part.offsets[0])] += each.part.values.shape[1]
    return Counter({place: -(-count // tokens) if count >= tokens else 0 for place, count in seen.items()})


_PARTS = {
    "embedding": "what the embedding gives",
    "projection": "what the norms and the projection of the depth give",
    "attention": "what the attention gives",
    "mlp": "what the MLP gives",
}


def forward_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """The first module, in the order of the forward, that is not computed once or has another output."""
    seen, model = runs.activations, runs.config.model
    for name in forward_order(model.num_layers, depths=model.mtp_num_layers, compiled=runs.config.speed.compile):
        joined = seen.joined.get(name, JoinedTensor(name, ()))
        times = _times_computed(runs, joined)
        if wrong := [place for place in runs.plain.microbatches if times[place] != 1]:
            text = "it is never computed: dropped from the forward"
            if times:
                data_rank, number = min(wrong)
                text = f"computed {listing(times[place] for place in wrong)} times instead of once "
                text += f"(microbatch {number} of data rank {data_rank} is the first such)"
            yield runs.finding(0, FindingKind.FORWARD, [name], text)
            return
        measured = seen.measured[name]
        if measured.differs:
            part = _PARTS.get(name.rpartition(".")[2], "the residual stream behind the layer")
            notes = [f"{part} differs, though all before it agrees"]
            for chunk in runs.table if name.endswith(".attention") else ():
                if not chunk.first and len(chunk.layers) and chunk.layers.start == layer_of(name):
                    sender = runs.table[chunk.index - 1].stage
                    notes.append(f"it is the first layer of its chunk, so what arrived from stage {sender} may be wrong too")
            if measured.rows:
                notes.append(f"only in microbatch {listing(_microbatch(runs, sample)[1] for sample in measured.rows)}")
            yield from tensor_findings(
                runs,
                0,
                FindingKind.FORWARD,
                seen,
                sentence(*notes),
                names=[name],
                factors=runs.factors(0),
                explain=_wrong_positions,
            )
            return


def _microbatch(runs: Comparison, sample: int) -> tuple[int, int]:
    """Data rank and index of the microbatch of a sample in the first step."""
    return runs.plain.microbatches[sample // runs.config.training.micro_batch_size]


def _wrong_positions(wrong: WrongTensor) -> tuple[str, str]:
    """Which tokens of the samples differ. The first token attends to itself alone, so queries and keys do not matter."""
    far = (wrong.joined.tensor - wrong.wanted).norm(dim=2) / wrong.wanted.norm(dim=2).clamp(min=1e-300)
    bad = (~(far <= 10 * TOLERANCE)).any(dim=0).nonzero().flatten().tolist()
    if not bad or len(bad) == far.shape[1]:
        return "", ""
    text = f"positions {listing(bad)} differ, the others agree"
    if wrong.joined.name.endswith(".attention") and bad[0] > 0:
        text += (
            " (the first token of a sample attends to itself alone, and is right: so are values and projections; "
            "queries and keys are not: rotary positions, the scale or the mask)"
        )
    return text, ""


def loss_findings(runs: Comparison, index: int, *, forward_agrees: bool) -> Iterator[ProofFinding]:
    """Differences in the count of samples and tokens, the sum of the loss and their quotient, in the step of this index."""
    mine, plain = runs.steps(index)
    numbers = partial(number_findings, runs, index)
    batch, samples, why = "the global batch", runs.num_samples(index), "the batch size, or its ramp-up"
    if wrong := [*numbers(FindingKind.COUNT, batch, "the number of samples", samples, plain.num_samples, why)]:
        yield from wrong
        return
    counted = sum(rank.steps[index].token_count for rank in runs.ranks)
    summed = sum(rank.steps[index].loss_sum for rank in runs.ranks)
    why = "all layers agree, so it is the final norm, the output layer, the cross entropy, labels or masks"
    if index:
        why = "the weights are right, so it is the samples, or values of parameters that are used before they arrive"
    why = why if forward_agrees else ""
    yield from numbers(FindingKind.COUNT, batch, "the count of tokens", counted, plain.token_count, divides=True)
    yield from numbers(FindingKind.LOSS, runs.place("output"), "the sum of the loss over the tokens", summed, plain.loss_sum, why)
    yield from numbers(FindingKind.LOSS, batch, "the mean loss", mine.loss, plain.loss)
    told = sorted({rank.steps[index].loss for rank in runs.ranks})
    if len(told) > 1 and all(map(math.isfinite, told)):
        text = f"ranks report {len(told)} different losses: {', '.join(f'{loss:.12g}' for loss in told[:3])}"
        yield runs.finding(index, FindingKind.LOSS, "the ranks' reports", text, relative(told[-1] - told[0], plain.loss))


# ---- gradients and update


def gradient_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the gradients of the step of this index, in the order of backward."""
    compared = runs.gradients[index]
    explain = left_over(runs.gradients[index - 1].joined) if index else microbatches_in(runs.plain)
    names = compared.differing[::-1]
    factors = runs.factors(index)
    yield from tensor_findings(runs, index, FindingKind.GRADIENT, compared, names=names, factors=factors, explain=explain)


def norm_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in the global norm of a step whose gradients agree: each element must be counted once."""
    mine, plain = runs.steps(index)
    counted: Counter[str] = Counter()
    for rank in runs.ranks:
        counted.update(rank.steps[index].counted_squares)
    wrong = {}
    for name, gradient in plain.gradients.items():
        wanted = norm(gradient) ** 2
        if abs(counted[name] - wanted) > 1e-6 * wanted + NEGLIGIBLE * plain.grad_norm**2:
            wrong[name] = f"{name} is {f'counted {counted[name] / wanted:.6g} times' if counted[name] else 'not counted'}"
    why = "each element is counted once, so it is the sum of squares over the world"
    if wrong:
        why = f"{', '.join(list(wrong.values())[:LISTED])}; clipping takes its factor from this norm"
    where = list(wrong) or _EVERYTHING
    yield from number_findings(runs, index, FindingKind.NORM, where, "the norm", mine.grad_norm, plain.grad_norm, why)


def update_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Differences in what the update is made with and in the weights, after a step whose gradients and norm agree."""
    mine, plain = runs.steps(index)
    if mine.skipped:
        text = "the step was skipped: the loss scaler took the gradient for an overflow"
        yield runs.finding(index, FindingKind.UPDATE, _EVERYTHING, text)
        return
    numbers = partial(number_findings, runs, index, FindingKind.UPDATE, _EVERYTHING)
    yield from numbers("the learning rate", mine.learning_rate, plain.learning_rate, "the schedule")
    yield from numbers("the weight decay", mine.weight_decay, plain.weight_decay, "the schedule")
    weights = runs.weights[index]
    if weights.differing:
        explain = wrong_update(runs.plain.steps[index - 1].weights if index else runs.observation.start)
        lead = "the gradient is right, the update is not"
        yield from tensor_findings(runs, index, FindingKind.UPDATE, weights, lead, explain=explain)
        return
    lead = "the optimizer holds the right values, but the next forward uses others: the update was not carried to the parameters"
    yield from tensor_findings(runs, index, FindingKind.REPLICAS, runs.parameters[index], lead)
    for what, compared in (("main parameters", weights), ("parameters", runs.parameters[index])):
        for name, joined in compared.joined.items():
            for replicas in joined.ranks_apart()[:1]:
                group, ranks = AXES[replicas.axis], replicas.ranks
                text = (
                    f"{what} that several ranks hold are not the same bits on ranks {listing(ranks)} of a {group} group: they will "
                    "drift apart"
                )
                yield runs.finding(index, FindingKind.REPLICAS, [name], text, replicas.apart(), group=group, ranks=ranks)
                return


def overwritten_findings(runs: Comparison, index: int) -> Iterator[ProofFinding]:
    """Tensors that a step wrote to while they were being sent. Here other ranks got the old content; on a cluster it is chance."""
    found = {rank.rank: rank.steps[index].overwritten for rank in runs.ranks if rank.steps[index].overwritten}
    if found:
        places = next(iter(found.values()))
        text = sentence("it was written to before it had left, so that chance decides what arrives", likewise(places))
        yield runs.finding(index, FindingKind.TRANSFER, places[0], text, ranks=list(found))


def evaluation_findings(runs: Comparison, up_to: int) -> Iterator[ProofFinding]:
    """The first difference in the evaluations with weights that agree.

    Args:
        up_to: number of steps after which the weights still agree.
    """
    why = (
        "though training with the same weights agrees: dropout is on where it should be off, parameters are used before they "
        "arrive, or the batches, their masks or their count are others than in training"
    )
    what, where = "the mean loss of an evaluation", "the held-out batches"
    both = zip(runs.ranks[0].evaluations[: up_to + 1], runs.plain.evaluations, strict=False)
    for number, (found, wanted) in enumerate(both):
        after = number - 1 if number else None
        if told := [*number_findings(runs, after, FindingKind.EVALUATION, where, what, found, wanted, why)]:
            yield from told
            return


# ---- dropout, which all else is compared without


def mask_findings(runs: Comparison) -> Iterator[ProofFinding]:
    """The first dropout mask that is drawn for two things, or of which ranks that hold the same values draw two.

    A mask is for a microbatch, a place in the model, and the tokens and channels that a rank holds there: all attention heads are
    divided over the tensor ranks, other values only under sequence parallelism.
    """
    divided = runs.config.parallel.sequence_parallel
    drawn: dict[tuple[object, ...], dict[int, int]] = {}  # by what the mask is for: the rank that first drew each seed
    users: dict[int, tuple[tuple[object, ...], int]] = {}
    for rank in runs.ranks:
        at = rank.coordinates
        for mask in rank.masks:
            axes = (*GRADIENT_AXES, "tp") if divided or mask.site == "attention" else GRADIENT_AXES
            use = (mask.layer, mask.site, mask.microbatch, *(at[axis] for axis in axes))
            seeds = drawn.setdefault(use, {})
            other, first = users.setdefault(mask.seed, (use, rank.rank))
            place = mask.site if mask.site == "embedding" else f"layers.{mask.layer}.{mask.site}"
            say = partial(ProofFinding, FindingKind.DROPOUT, 1, place)
            if mask.seed not in seeds and seeds:
                before = next(iter(seeds.values()))
                if before == rank.rank:
                    text = "is drawn again in backward, but as another one: the gradient is not that of the forward"
                    yield say(text, math.inf, ranks=(before,))
                    return
                text = f"differs on ranks {listing((before, rank.rank))}, which hold the same values: they no longer agree"
                yield say(text, math.inf, group=_apart(runs, before, rank.rank), ranks=(before, rank.rank))
                return
            seeds.setdefault(mask.seed, rank.rank)
            if other != use:
                group = _apart(runs, first, rank.rank) if other[:3] == use[:3] else ""
                where = f"ranks {listing((first, rank.rank))} of a {group} group" if group else f"rank {rank.rank}"
                what = "different tokens or channels" if group else "another layer, site or microbatch"
                yield say(
                    f"is repeated on {where}, for {what}: it must be drawn anew", math.inf, group=group, ranks=(first, rank.rank)
                )
                return


def _apart(runs: Comparison, one: int, other: int) -> str:
    """The axis, in words, along which two ranks have different places: the first, if there are several."""
    places = {rank.rank: rank.coordinates for rank in runs.ranks}
    return next((AXES[axis] for axis, place in places[one].items() if place != places[other][axis]), "")
