"""What a difference between the two runs is told as, on observations in which one thing was changed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch

from megatron.pipeline_parallel.partition import Chunk
from megatron_lab.verification.comparison import FindingType
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.findings import check_layer_table
from tests.support.verify_observations import (
    DATA,
    STAGES,
    TENSOR,
    first_finding,
    gradients,
    observed,
    parts,
    random_like,
    scale_gradients,
)

QKV = "layers.1.attention.qkv.weight"
NORM = "layers.1.mlp_norm.weight"


@pytest.mark.parametrize("flags", [TENSOR, STAGES, DATA])
def test_what_was_not_changed_is_equal(flags: str) -> None:
    found = diagnose(observed(flags))
    assert found.equal and found.worst.difference.relative < 1e-10 and found.num_steps == 2 and found.num_parameters == 28
    assert len(found.rows) == 2 * 2 * 28


# ---- gradients


@pytest.mark.parametrize(
    ("factor", "words"),
    [(2.0, "2.0x, the tensor size: a sum over the tensor group is counted twice"), (0.5, "0.5x, 1 / the tensor size")],
)
def test_a_factor_is_the_tensor_size(factor: float, words: str) -> None:
    observation = observed()
    scale_gradients(observation, factor)
    found = first_finding(observation)
    assert found.kind is FindingType.GRADIENT and found.group == "tensor" and found.step == 1
    assert words in found.text and "so are the gradients of all parameters" in found.text and len(found.names) == 28


def test_a_factor_of_one_parameter() -> None:
    observation = observed()
    for _, part in parts(observation, gradients(), QKV):
        part.values.mul_(6)
    found = first_finding(observation)
    assert found.place == f"{QKV} (layer 1)" and found.names == (QKV,)
    assert "6.0x, the number of microbatches: microbatches are summed where their mean is meant" in found.text


def test_a_missing_sum_over_the_tensor_group() -> None:
    observation = observed()
    for rank, part in parts(observation, gradients(), NORM):
        noise = random_like(part.values)
        part.values.mul_(0.5).add_(noise if rank else -noise)
    found = first_finding(observation)
    assert found.group == "tensor" and found.ranks == (0, 1) and found.place == f"{NORM} (layer 1)"
    assert "the sum over the tensor group is missing" in found.text


def test_replicas_that_differ_otherwise() -> None:
    observation = observed()
    rank_1 = next(part for rank, part in parts(observation, gradients(), NORM) if rank == 1)
    rank_1.values.add_(random_like(rank_1.values))
    found = first_finding(observation)
    assert "only on tensor rank 1" in found.text and found.ranks == (1,)
    assert "the tensor ranks hold different values" in found.text


def test_a_wrong_slice() -> None:
    observation = observed()
    rank_1 = next(part for rank, part in parts(observation, gradients(), QKV) if rank == 1)
    rank_1.values.add_(random_like(rank_1.values))
    found = first_finding(observation)
    assert "only on tensor rank 1" in found.text and found.ranks == (1,)


def test_a_gradient_that_does_not_arrive() -> None:
    observation = observed()
    for _, part in parts(observation, gradients(), QKV):
        part.values.zero_()
    assert "zero: nothing reaches it" in first_finding(observation).text


def test_a_gradient_that_is_not_finite() -> None:
    observation = observed()
    next(part for rank, part in parts(observation, gradients(), QKV) if rank == 1).values[0, 0] = math.nan
    found = first_finding(observation)
    assert "not finite, on rank 1" in found.text and found.ranks == (1,)


def test_the_tied_embedding_is_not_joined() -> None:
    observation = observed(STAGES)
    for rank, part in parts(observation, gradients(), "embedding.word.weight"):
        noise = random_like(part.values)
        part.values.mul_(0.5).add_(noise if rank else -noise)
    found = first_finding(observation)
    assert (
        "the gradient of the tied embedding is not reduced" in found.text and found.group == "pipeline" and found.stages == (0, 1)
    )


def test_a_missing_microbatch() -> None:
    """Of one data rank, on the other: what it was reduced without."""
    observation = observed(DATA)
    plain = observation.reference
    lost = max(number for number, place in enumerate(plain.microbatches) if place[0] == 1 and plain.microbatch_tokens[number])
    last = max(place[1] for place in plain.microbatches)
    rank_0 = next(part for rank, part in parts(observation, gradients(), NORM) if rank == 0)
    rank_0.values.sub_(rank_0.select(plain.contributions[NORM][lost]))
    found = first_finding(observation)
    microbatch = plain.microbatches[lost][1]
    why = "reduced before the last gradient was in it" if microbatch == last else "reduced too early, or never added"
    assert f"microbatch {microbatch} of data rank 1 is missing: {why}; only on data rank 0" in found.text and found.ranks == (0,)


def test_a_missing_microbatch_of_a_lone_data_rank() -> None:
    """Nothing is reduced there."""
    observation = observed()
    plain = observation.reference
    lost = next(number for number, tokens in enumerate(plain.microbatch_tokens) if tokens)
    for _, part in parts(observation, gradients(), NORM):
        part.values.sub_(part.select(plain.contributions[NORM][lost]))
    found = first_finding(observation)
    assert f"microbatch {lost} of data rank 0 is missing: never added" in found.text and found.group == ""


def test_microbatches_that_overwrite_those_before() -> None:
    """On every data rank: it is no matter of the reduction."""
    observation = observed(DATA)
    plain = observation.reference
    counted = [place for place, tokens in zip(plain.microbatches, plain.microbatch_tokens, strict=True) if tokens]
    last = {rank: max(number for of, number in counted if of == rank) for rank in (0, 1)}
    kept = [float(last[rank] == number) for rank, number in plain.microbatches]
    found_sum = torch.einsum("m,m...->...", torch.tensor(kept, dtype=torch.float64), plain.contributions[NORM])
    for _, part in parts(observation, gradients(), NORM):
        part.values.copy_(part.select(found_sum))
    found = first_finding(observation)
    assert "only the last microbatch is in it: each overwrites those before it" in found.text and found.group == ""


def test_layers_out_of_order() -> None:
    table = [Chunk(0, 4, 0, range(2)), Chunk(1, 4, 1, range(4, 6)), Chunk(2, 4, 0, range(2, 4)), Chunk(3, 4, 1, range(6, 8))]
    (found,) = check_layer_table(table, 8)
    assert found.kind is FindingType.PARAMETERS and found.names == ("layers.2",) and found.stages == (0,)
    assert found.text == "the layers are out of order: chunk 2 starts with layer 2, after layer 5 of chunk 1"
    assert not list(check_layer_table([table[0], dataclasses.replace(table[1], layers=range(2, 4))], 4))


def test_a_step_of_the_wrong_size() -> None:
    observation = observed(DATA)
    plain = observation.reference
    plain.steps[1] = dataclasses.replace(plain.steps[1], num_samples=4)
    found = first_finding(observation)
    assert (found.kind, found.step) == (
        FindingType.COUNT,
        2,
    ) and "the number of samples is 6, the reference's 4: 1.5x" in found.text


def test_a_microbatch_counted_twice() -> None:
    observation = observed(DATA)
    plain = observation.reference
    more = next(number for number, tokens in enumerate(plain.microbatch_tokens) if tokens)
    for _, part in parts(observation, gradients(), NORM):
        part.values.add_(part.select(plain.contributions[NORM][more]))
    data_rank, microbatch = plain.microbatches[more]
    assert f"microbatch {microbatch} of data rank {data_rank} counts 2 times" in first_finding(observation).text


@pytest.mark.parametrize("each", ["microbatch", "data rank"])
def test_a_mean_of_means(each: str) -> None:
    observation = observed(DATA)
    plain = observation.reference
    weighed = Counter[object]()  # tokens of those that weigh the same
    ones = plain.microbatches if each == "microbatch" else [rank for rank, _ in plain.microbatches]
    for one, tokens in zip(ones, plain.microbatch_tokens, strict=True):
        weighed[one] += int(tokens)
    total, kept = sum(plain.microbatch_tokens), [one for one in weighed if weighed[one]]
    assert len({weighed[one] for one in kept}) > 1
    weights = [total / weighed[one] / len(kept) if weighed[one] else 0.0 for one in ones]
    mean = torch.einsum("m,m...->...", torch.tensor(weights, dtype=torch.float64), plain.contributions[NORM])
    for _, part in parts(observation, gradients(), NORM):
        part.values.copy_(part.select(mean))
    assert f"each {each} weighs the same, however many tokens count in it" in first_finding(observation).text


def test_the_sum_over_the_data_group_is_missing() -> None:
    observation = observed(DATA)
    plain = observation.reference
    for rank, part in parts(observation, gradients(), NORM):
        mine = [number for number, place in enumerate(plain.microbatches) if place[0] == rank]
        part.values.copy_(part.select(plain.contributions[NORM][mine].sum(dim=0)))
    found = first_finding(observation)
    assert "the sum over the data group is missing" in found.text and found.group == "data"


def test_what_a_step_leaves_to_the_next() -> None:
    observation = observed()
    for (_, part), (_, before) in zip(parts(observation, gradients(1), QKV), parts(observation, gradients(0), QKV), strict=True):
        part.values.add_(before.values)
    found = first_finding(observation)
    assert found.step == 2 and "it still holds the gradient of the step before" in found.text


def test_the_first_in_the_order_of_backward_is_told() -> None:
    observation = observed()
    for name in ("layers.0.mlp.up.weight", QKV, "layers.1.mlp.down.weight"):
        for _, part in parts(observation, gradients(), name):
            part.values.add_(random_like(part.values))
    assert first_finding(observation).place == "layers.1.mlp.down.weight (layer 1)"


# ---- before and in the forward


def test_a_parameter_that_nobody_holds() -> None:
    observation = observed()
    for rank in observation.ranks:
        rank.start[:] = [part for part in rank.start if part.name != QKV]
    found = first_finding(observation)
    assert found.kind is FindingType.PARAMETERS and found.place.startswith(QKV) and found.text == "no rank holds it"


def test_elements_that_nobody_holds() -> None:
    observation = observed()
    rank = observation.ranks[1]
    rank.start[:] = [part for part in rank.start if part.name != QKV]
    assert "no rank holds 96 of its 192 elements" in first_finding(observation).text


def test_a_parameter_of_another_shape() -> None:
    observation = observed()
    for rank in observation.ranks:
        shapes = {part.name: (48, 8) if part.name == QKV else part.shape for part in rank.start}
        rank.start[:] = [dataclasses.replace(part, shape=shapes[part.name]) for part in rank.start]
    found = first_finding(observation)
    assert found.kind is FindingType.PARAMETERS and found.text == "ranks report the full shape [48, 8]; it should be [24, 8]"


def test_initial_values_that_depend_on_the_layout() -> None:
    observation = observed()
    for _, part in parts(observation, lambda rank: rank.initial, QKV):
        part.values.mul_(1.5)
    found = first_finding(observation)
    assert found.kind is FindingType.INITIAL and found.step == 0 and "initialization depends on the layout" in found.text


def test_start_weights_that_were_not_taken() -> None:
    observation = observed()
    for _, part in parts(observation, lambda rank: rank.start, QKV):
        part.values.add_(1e-3)
    assert first_finding(observation).kind is FindingType.START


@pytest.mark.parametrize(
    ("tensor_rank", "position", "words"),
    [(1, slice(None), "only on tensor rank 1"), (None, slice(1, None), "the first token of a sample attends only to itself")],
)
def test_a_wrong_activation(tensor_rank: int | None, position: slice, words: str) -> None:
    observation = observed()
    for rank in observation.ranks:
        for each in rank.activations:
            if each.name in ("layers.1.attention", "layers.1") and tensor_rank in (None, rank.rank):
                each.values[:, position] += 0.1 * random_like(each.values[:, position])
    found = first_finding(observation)
    assert found.kind is FindingType.FORWARD and found.place == "layers.1.attention (layer 1)"
    assert "the output of attention differs, although all earlier outputs agree" in found.text and words in found.text
    assert found.ranks == (() if tensor_rank is None else (1,))


@pytest.mark.parametrize(("bias", "but"), [(0.0, ""), (0.3, ", except for a bias that each rank adds")])
def test_a_sum_that_the_forward_lacks(bias: float, but: str) -> None:
    observation = observed()
    for rank in observation.ranks:
        for each in rank.activations:
            if each.name == "layers.0.mlp":
                noise = random_like(each.values)
                each.values.mul_(0.5).add_(noise if rank.rank else -noise).add_(bias)
    found = first_finding(observation)
    assert "the sum over the tensor group is missing" in found.text and f"the total of the partial sums is right{but}" in found.text
    assert found.group == "tensor"


def test_a_layer_that_is_never_computed() -> None:
    observation = observed(STAGES)
    for rank in observation.ranks:
        rank.activations[:] = [each for each in rank.activations if not each.name.startswith("layers.1")]
    found = first_finding(observation)
    assert found.place.startswith("layers.1.attention (layer 1, stage 1)") and "it is never computed" in found.text


def test_a_layer_that_is_computed_twice() -> None:
    observation = observed()
    for rank in observation.ranks:
        again = [each for each in rank.activations if each.name == "layers.0.attention" and each.offsets[0] == 2]
        rank.activations.extend(again)
    assert "computed 2 times instead of once (microbatch 2 of data rank 0" in first_finding(observation).text


def test_a_count_that_ignores_the_mask() -> None:
    observation = observed()
    tokens = 6 * 8
    counting = next(rank for rank in observation.ranks if rank.steps[0].token_count)
    counting.steps[0] = dataclasses.replace(counting.steps[0], token_count=float(tokens))
    found = first_finding(observation)
    assert (
        found.kind is FindingType.COUNT
        and "the count of tokens is 48, the reference's 25" in found.text
        and "the count of tokens ignores the loss mask" in found.text
    )


def test_a_wrong_sum_of_the_loss() -> None:
    observation = observed()
    counting = next(rank for rank in observation.ranks if rank.steps[0].loss_sum)
    counting.steps[0] = dataclasses.replace(counting.steps[0], loss_sum=2 * counting.steps[0].loss_sum)
    found = first_finding(observation)
    assert found.kind is FindingType.LOSS and "2.0x, the tensor size" in found.text and "the cross entropy" in found.text
