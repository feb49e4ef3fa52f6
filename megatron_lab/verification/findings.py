"""Checks that yield the differences of a parallel run from the reference run, in causal order: start values, forward, loss,
gradients, gradient norm, update, parameters of the next forward, and evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from megatron.parallel.topology import GRADIENT_AXES
from megatron.pipeline_parallel.partition import Chunk
from megatron_lab.verification.causes import (
    MAX_LISTED_NAMES,
    DifferingTensor,
    build_microbatch_explanation,
    build_stale_gradient_explanation,
    build_update_explanation,
    check_scalar,
    check_tensors,
    format_further_names,
    join_clauses,
)
from megatron_lab.verification.comparison import Comparison, FindingType, ProofFinding
from megatron_lab.verification.difference_text import (
    NEGLIGIBLE,
    TOLERANCE,
    compute_relative,
    find_stages,
    format_integers,
    format_location,
    get_layer_index,
    list_activations,
)
from megatron_lab.verification.gathered_tensors import AXIS_NAMES, GatheredTensor, compute_norm

_EVERYTHING = "all parameters"


# ---- before the first step


def check_start(comparison: Comparison) -> Iterator[ProofFinding]:
    """Yield the differences that exist before the first step: in the assignment of layers to stages, the set of parameters, and
    their values."""
    yield from check_layer_table(comparison.layer_table, comparison.config.model.num_layers, comparison.observation.start)
    yield from _check_parameters(comparison)
    lead = "differs from the given start weights: values are loaded wrongly, or copied wrongly to the model"
    yield from check_tensors(comparison, None, FindingType.START, comparison.start, lead)
    lead = "is initialized to values that differ from those of one process: initialization depends on the layout"
    yield from check_tensors(comparison, None, FindingType.INITIAL, comparison.initial, lead)


def check_layer_table(layer_table: Sequence[Chunk], num_layers: int, parameters: Iterable[str] = ()) -> Iterator[ProofFinding]:
    """Check that each layer is assigned to exactly one model chunk, and that the chunks have the layers in order. Yield the
    mistakes.

    Args:
        layer_table: model chunks of all pipeline stages, each with its layers.
        num_layers: number of layers of the model.
        parameters: names of the model's parameters. A report entry about a layer lists the parameters of the layer.
    """

    def build_finding(names: Sequence[str], text: str) -> ProofFinding:
        location, stages = format_location(names[0], layer_table), tuple(find_stages(names[0], layer_table))
        return ProofFinding(FindingType.PARAMETERS, 0, location, text, math.inf, tuple(names), stages)

    for layer in range(num_layers):
        chunks = [chunk for chunk in layer_table if layer in chunk.layers]
        if len(chunks) != 1:
            text = "the layer is dropped: the layer table gives it to no stage, so it is never computed and never trained"
            if chunks:
                text = f"the layer is doubled: chunks {format_integers(chunk.index for chunk in chunks)} both hold it"
            yield build_finding([f"layers.{layer}", *(name for name in parameters if get_layer_index(name) == layer)], text)
    for previous, chunk in pairwise(chunk for chunk in sorted(layer_table, key=lambda chunk: chunk.index) if chunk.layers):
        first, last = chunk.layers[0], previous.layers[-1]
        if first <= last:
            behind = f"after layer {last} of chunk {previous.index}"
            text = f"the layers are out of order: chunk {chunk.index} starts with layer {first}, {behind}"
            yield build_finding([f"layers.{first}"], text)
            return


def _check_parameters(comparison: Comparison) -> Iterator[ProofFinding]:
    """Check that the ranks together hold every element of each parameter, with the right shape, and no unknown parameter. Yield the
    mistakes."""
    actual, expected = comparison.start.actual, comparison.observation.start
    for name in dict.fromkeys([*expected, *actual]):
        if get_layer_index(name) is not None and not find_stages(name, comparison.layer_table):
            continue  # check_layer_table reports the missing layer
        text = ""
        if name not in expected:
            text = "the model of these settings has no such parameter"
        elif name not in actual:
            text = "no rank holds it"
        elif actual[name].shapes != {tuple(expected[name].shape)}:
            shapes = ", ".join(str(list(shape)) for shape in sorted(actual[name].shapes))
            text = f"ranks report the full shape {shapes}; it should be {list(expected[name].shape)}"
        elif actual[name].num_missing:
            text = f"no rank holds {actual[name].num_missing:,} of its {expected[name].numel():,} elements"
        if text:
            yield comparison.build_finding(None, FindingType.PARAMETERS, [name], text)


# ---- forward and loss


def _count_computations(comparison: Comparison, actual: GatheredTensor) -> Counter[tuple[int, int]]:
    """Count how often the ranks computed the output of a module for each microbatch. The keys are (data-parallel rank, index of the
    microbatch).

    The count is the number of tokens recorded on the ranks with tensor-parallel rank 0, divided by the tokens of a microbatch.

    Args:
        actual: recorded outputs of the module.
    """
    parallel = comparison.config.parallel
    tokens_per_microbatch = comparison.config.model.seq_length // (
        parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    )
    token_counts: Counter[tuple[int, int]] = Counter()
    for rank_tensor in actual.rank_tensors:
        if rank_tensor.coordinates["tp"] == 0:
            token_counts[_get_microbatch(comparison, rank_tensor.local.offsets[0])] += rank_tensor.local.values.shape[1]
    return Counter(
        {
            microbatch: -(-count // tokens_per_microbatch) if count >= tokens_per_microbatch else 0
            for microbatch, count in token_counts.items()
        }
    )


_OUTPUT_NAMES = {
    "embedding": "the output of the embedding",
    "projection": "the output of the norms and the projection of the MTP layer",
    "attention": "the output of attention",
    "mlp": "the output of the MLP",
}


def check_forward(comparison: Comparison) -> Iterator[ProofFinding]:
    """Find the first module in the order of the forward that is not computed exactly once per microbatch, or whose output differs.
    Yield its differences."""
    compared, model = comparison.activations, comparison.config.model
    for name in list_activations(model.num_layers, num_mtp_layers=model.mtp_num_layers, compiled=comparison.config.speed.compile):
        actual = compared.actual.get(name, GatheredTensor(name, ()))
        num_computations = _count_computations(comparison, actual)
        if wrong_microbatches := [
            microbatch for microbatch in comparison.reference.microbatches if num_computations[microbatch] != 1
        ]:
            text = "it is never computed: dropped from the forward"
            if num_computations:
                data_rank, microbatch_index = min(wrong_microbatches)
                counts = format_integers(num_computations[microbatch] for microbatch in wrong_microbatches)
                text = (
                    f"computed {counts} times instead of once (microbatch {microbatch_index} of data rank {data_rank}, for example)"
                )
            yield comparison.build_finding(0, FindingType.FORWARD, [name], text)
            return
        difference = compared.differences[name]
        if difference.differs:
            output_name = _OUTPUT_NAMES.get(name.rpartition(".")[2], "the residual stream after the layer")
            clauses = [f"{output_name} differs, although all earlier outputs agree"]
            for chunk in comparison.layer_table if name.endswith(".attention") else ():
                if not chunk.is_first and len(chunk.layers) and chunk.layers.start == get_layer_index(name):
                    sender = comparison.layer_table[chunk.index - 1].stage
                    clauses.append(f"it is the first layer of its chunk, so the input from stage {sender} may be wrong too")
            if difference.rows:
                clauses.append(
                    f"only in microbatch {format_integers(_get_microbatch(comparison, sample)[1] for sample in difference.rows)}"
                )
            yield from check_tensors(
                comparison,
                0,
                FindingType.FORWARD,
                compared,
                join_clauses(*clauses),
                names=[name],
                factors=comparison.build_factors(0),
                explain=_explain_positions,
            )
            return


def _get_microbatch(comparison: Comparison, sample: int) -> tuple[int, int]:
    """Return the microbatch of the first step that contains a sample: its data-parallel rank, and its index on that rank. `sample`
    is the index in the global batch."""
    return comparison.reference.microbatches[sample // comparison.config.training.micro_batch_size]


def _explain_positions(tensor: DifferingTensor) -> tuple[str, str]:
    """Explain a difference in outputs [B, s, h] by the sequence positions at which the outputs differ. Return (explanation, axis)
    like the other functions that explain differences. The explanation is "" if all positions differ. The axis is always "", because
    positions point to no parallelism axis.

    The first token of a sample attends only to itself, so its attention output does not depend on queries and keys. If only later
    tokens differ, queries or keys are wrong.
    """
    relative_differences = (tensor.actual.tensor - tensor.expected).norm(dim=2) / tensor.expected.norm(dim=2).clamp(min=1e-300)
    positions = (~(relative_differences <= 10 * TOLERANCE)).any(dim=0).nonzero().flatten().tolist()
    if not positions or len(positions) == relative_differences.shape[1]:
        return "", ""
    text = f"positions {format_integers(positions)} differ, the others agree"
    if tensor.actual.name.endswith(".attention") and positions[0] > 0:
        text += (
            " (the first token of a sample attends only to itself and is right, so values and projections are right; "
            "queries and keys are wrong: rotary positions, the scale or the mask)"
        )
    return text, ""


def check_loss(comparison: Comparison, index: int, *, forward_agrees: bool) -> Iterator[ProofFinding]:
    """Yield the differences in the number of samples and tokens, in the sum of the losses, and in the mean loss of a step.

    Args:
        index: index of the step, from 0.
        forward_agrees: whether the outputs of all layers agree with the reference run.
    """
    rank_step, reference_step = comparison.get_steps(index)
    check = partial(check_scalar, comparison, index)
    location, num_samples, hint = "the global batch", comparison.get_num_samples(index), "the batch size, or its ramp-up"
    if findings := [*check(FindingType.COUNT, location, "the number of samples", num_samples, reference_step.num_samples, hint)]:
        yield from findings
        return
    token_count = sum(rank.steps[index].token_count for rank in comparison.ranks)
    loss_sum = sum(rank.steps[index].loss_sum for rank in comparison.ranks)
    hint = "all layers agree, so it is the final norm, the output layer, the cross entropy, labels or masks"
    if index:
        hint = "the weights are right, so it is the samples, or values of parameters that are used before they arrive"
    hint = hint if forward_agrees else ""
    yield from check(FindingType.COUNT, location, "the count of tokens", token_count, reference_step.token_count, is_divisor=True)
    yield from check(
        FindingType.LOSS,
        comparison.describe_location("output"),
        "the sum of the loss over the tokens",
        loss_sum,
        reference_step.loss_sum,
        hint,
    )
    yield from check(FindingType.LOSS, location, "the mean loss", rank_step.loss, reference_step.loss)
    losses = sorted({rank.steps[index].loss for rank in comparison.ranks})
    if len(losses) > 1 and all(map(math.isfinite, losses)):
        text = f"ranks report {len(losses)} different losses: {', '.join(f'{loss:.12g}' for loss in losses[:3])}"
        yield comparison.build_finding(
            index, FindingType.LOSS, "the ranks' reports", text, compute_relative(losses[-1] - losses[0], reference_step.loss)
        )


# ---- gradients and update


def check_gradients(comparison: Comparison, index: int) -> Iterator[ProofFinding]:
    """Yield the differences in the gradients of a step, in the order of the backward; `index` counts the steps from 0."""
    compared = comparison.gradients[index]
    explain = (
        build_stale_gradient_explanation(comparison.gradients[index - 1].actual)
        if index
        else build_microbatch_explanation(comparison.reference)
    )
    names = compared.differing_names[::-1]
    factors = comparison.build_factors(index)
    yield from check_tensors(comparison, index, FindingType.GRADIENT, compared, names=names, factors=factors, explain=explain)


def check_grad_norm(comparison: Comparison, index: int) -> Iterator[ProofFinding]:
    """Yield the differences in the global gradient norm of a step whose gradients agree; `index` counts the steps from 0. The norm
    must count each gradient element once, even if several ranks hold it."""
    rank_step, reference_step = comparison.get_steps(index)
    squared_norms: Counter[str] = Counter()
    for rank in comparison.ranks:
        squared_norms.update(rank.steps[index].squared_norms)
    descriptions = {}
    for name, gradient in reference_step.gradients.items():
        expected = compute_norm(gradient) ** 2
        if abs(squared_norms[name] - expected) > 1e-6 * expected + NEGLIGIBLE * reference_step.grad_norm**2:
            descriptions[name] = (
                f"{name} is {f'counted {squared_norms[name] / expected:.6g} times' if squared_norms[name] else 'not counted'}"
            )
    hint = "each element is counted once, so it is the sum of squares over the world"
    if descriptions:
        hint = f"{', '.join(list(descriptions.values())[:MAX_LISTED_NAMES])}; clipping takes its factor from this norm"
    location = list(descriptions) or _EVERYTHING
    yield from check_scalar(
        comparison, index, FindingType.NORM, location, "the norm", rank_step.grad_norm, reference_step.grad_norm, hint
    )


def check_update(comparison: Comparison, index: int) -> Iterator[ProofFinding]:
    """Yield the differences in the update of a step whose gradients and norm agree; `index` counts the steps from 0.

    Compared are the learning rate, the weight decay, the new main parameters, the model parameters of the next forward, and
    replicas of both.
    """
    rank_step, reference_step = comparison.get_steps(index)
    if rank_step.skipped:
        text = "the step was skipped: the loss scaler took the gradient for an overflow"
        yield comparison.build_finding(index, FindingType.UPDATE, _EVERYTHING, text)
        return
    check = partial(check_scalar, comparison, index, FindingType.UPDATE, _EVERYTHING)
    yield from check("the learning rate", rank_step.learning_rate, reference_step.learning_rate, "the schedule")
    yield from check("the weight decay", rank_step.weight_decay, reference_step.weight_decay, "the schedule")
    weights = comparison.weights[index]
    if weights.differing_names:
        explain = build_update_explanation(comparison.reference.steps[index - 1].weights if index else comparison.observation.start)
        lead = "the gradient is right, the update is not"
        yield from check_tensors(comparison, index, FindingType.UPDATE, weights, lead, explain=explain)
        return
    lead = (
        "the optimizer holds the right values, but the next forward uses others: the new values were not copied to the parameters"
    )
    yield from check_tensors(comparison, index, FindingType.REPLICAS, comparison.parameters[index], lead)
    for quantity, compared in (("main parameters", weights), ("parameters", comparison.parameters[index])):
        for name, actual in compared.actual.items():
            for replica_set in actual.find_differing_replicas()[:1]:
                group, ranks = AXIS_NAMES[replica_set.axis], replica_set.ranks
                text = (
                    f"replicas of {quantity} differ between ranks {format_integers(ranks)} of a {group} group: they are not "
                    "the same bits and will drift apart"
                )
                yield comparison.build_finding(
                    index, FindingType.REPLICAS, [name], text, replica_set.compute_max_difference(), group=group, ranks=ranks
                )
                return


def check_overwritten(comparison: Comparison, index: int) -> Iterator[ProofFinding]:
    """Yield a report entry for the tensors that a step overwrote while they were being sent; `index` counts the steps from 0.

    In this local run, the receivers got the old content. On a cluster, they may get either the old or the new content.
    """
    tensors_by_rank = {rank.rank: rank.steps[index].overwritten for rank in comparison.ranks if rank.steps[index].overwritten}
    if tensors_by_rank:
        tensors = next(iter(tensors_by_rank.values()))
        text = join_clauses(
            "it was overwritten before it was sent, so the receiver gets old or new values by chance", format_further_names(tensors)
        )
        yield comparison.build_finding(index, FindingType.TRANSFER, tensors[0], text, ranks=list(tensors_by_rank))


def check_evaluations(comparison: Comparison, num_agreeing_steps: int) -> Iterator[ProofFinding]:
    """Yield the first evaluation whose loss differs although the weights agree.

    Args:
        num_agreeing_steps: number of steps, from the first on, after which the weights of both runs still agree.
    """
    hint = (
        "though training with the same weights agrees: dropout is on where it should be off, parameters are used before they "
        "arrive, or the batches, their masks or their number are wrong"
    )
    quantity, location = "the mean loss of an evaluation", "the held-out batches"
    losses = zip(comparison.ranks[0].evaluations[: num_agreeing_steps + 1], comparison.reference.evaluations, strict=False)
    for index, (actual, expected) in enumerate(losses):
        step_index = index - 1 if index else None
        if findings := [*check_scalar(comparison, step_index, FindingType.EVALUATION, location, quantity, actual, expected, hint)]:
            yield from findings
            return


# ---- dropout masks, from a separate step: all other steps run without dropout


def check_dropout_masks(comparison: Comparison) -> Iterator[ProofFinding]:
    """Yield a report entry for the first wrong dropout mask: used twice, or different on ranks that hold the same activations.

    A mask belongs to a microbatch, a dropout site in the model, and the tokens and channels that a rank holds there. So ranks of a
    tensor-parallel group need different masks where activations are split between them: for attention heads always, elsewhere only
    under sequence parallelism.
    """
    splits_sequence = comparison.config.parallel.sequence_parallel
    seeds_by_use: dict[tuple[object, ...], dict[int, int]] = {}  # use of a mask -> seed -> first rank that drew it
    users: dict[int, tuple[tuple[object, ...], int]] = {}  # seed -> first use and rank
    for rank in comparison.ranks:
        coordinates = rank.coordinates
        for mask in rank.masks:
            axes = (*GRADIENT_AXES, "tp") if splits_sequence or mask.site == "attention" else GRADIENT_AXES
            use = (mask.layer, mask.site, mask.microbatch, *(coordinates[axis] for axis in axes))
            seeds = seeds_by_use.setdefault(use, {})
            first_use, first_rank = users.setdefault(mask.seed, (use, rank.rank))
            location = mask.site if mask.site == "embedding" else f"layers.{mask.layer}.{mask.site}"
            build_finding = partial(ProofFinding, FindingType.DROPOUT, 1, location)
            if mask.seed not in seeds and seeds:
                previous_rank = next(iter(seeds.values()))
                if previous_rank == rank.rank:
                    text = "is drawn again in backward with another seed: the gradient does not match the forward"
                    yield build_finding(text, math.inf, ranks=(previous_rank,))
                    return
                ranks = format_integers((previous_rank, rank.rank))
                text = f"differs on ranks {ranks}, although they hold the same values: these no longer agree"
                yield build_finding(
                    text,
                    math.inf,
                    group=_find_differing_axis(comparison, previous_rank, rank.rank),
                    ranks=(previous_rank, rank.rank),
                )
                return
            seeds.setdefault(mask.seed, rank.rank)
            if first_use != use:
                group = _find_differing_axis(comparison, first_rank, rank.rank) if first_use[:3] == use[:3] else ""
                location_text = (
                    f"ranks {format_integers((first_rank, rank.rank))} of a {group} group" if group else f"rank {rank.rank}"
                )
                other_use = "different tokens or channels" if group else "another layer, site or microbatch"
                yield build_finding(
                    f"is repeated on {location_text}, for {other_use}: each needs a mask of its own",
                    math.inf,
                    group=group,
                    ranks=(first_rank, rank.rank),
                )
                return


def _find_differing_axis(comparison: Comparison, first_rank: int, second_rank: int) -> str:
    """Return the name of the first axis along which two ranks have different coordinates."""
    coordinates = {rank.rank: rank.coordinates for rank in comparison.ranks}
    return next(
        (AXIS_NAMES[axis] for axis, coordinate in coordinates[first_rank].items() if coordinate != coordinates[second_rank][axis]),
        "",
    )
