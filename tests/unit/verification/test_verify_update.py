"""What a difference after the gradients is told as: the norm, the update, replicas, evaluations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_lab.verification.comparison import FindingType
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.observation import Observation, RankObservation
from tests.support.verify_observations import DATA, first_finding, observed, parts

QKV = "layers.1.attention.qkv.weight"
NORM = "layers.1.mlp_norm.weight"


def change_steps(observation: Observation, step: int, **changes: Any) -> None:
    """What every rank reports of a step."""
    for rank in observation.ranks:
        rank.steps[step] = dataclasses.replace(rank.steps[step], **changes)


def main_params(step: int = 0) -> Any:
    return lambda rank: rank.steps[step].main_params


def parameters(step: int) -> Any:
    return lambda rank: rank.steps[step].parameters


def test_a_norm_that_counts_replicas_twice() -> None:
    """A parameter that both tensor ranks hold is counted by both."""
    observation = observed()
    one, other = observation.ranks
    holder, copy = (one, other) if NORM in one.steps[0].squared_norms else (other, one)
    square = copy.steps[0].squared_norms[NORM] = holder.steps[0].squared_norms[NORM]
    norm = observation.reference.steps[0].grad_norm
    change_steps(observation, 0, grad_norm=(norm**2 + square) ** 0.5)
    found = first_finding(observation)
    assert found.kind is FindingType.NORM and f"{NORM} is counted 2 times" in found.text and found.names == (NORM,)


def test_a_norm_that_leaves_something_out() -> None:
    observation = observed()
    for rank in observation.ranks:
        del rank.steps[0].squared_norms[QKV]
    change_steps(observation, 0, grad_norm=0.9 * observation.reference.steps[0].grad_norm)
    assert f"{QKV} is not counted" in first_finding(observation).text


def test_what_is_written_to_on_its_way() -> None:
    """It may have done no harm here."""
    observation = observed()
    kinds = ["a message of shape [2] to rank 1", *"bcdefg"]
    observation.ranks[1].steps[1].overwritten.extend(kinds)
    found = first_finding(observation)
    assert (found.kind, found.step, found.place, found.ranks) == (FindingType.TRANSFER, 2, kinds[0], (1,))
    assert "overwritten before it was sent" in found.text and found.text.endswith("; likewise b, c, d, e, f and 1 others")


def test_a_norm_that_is_summed_too_often() -> None:
    observation = observed()
    change_steps(observation, 0, grad_norm=2**0.5 * observation.reference.steps[0].grad_norm)
    assert (
        ": 1.41421x what it should be; each element is counted once, so it is the sum of squares" in first_finding(observation).text
    )


@pytest.mark.parametrize("what", ["learning_rate", "weight_decay"])
def test_a_wrong_schedule(what: str) -> None:
    observation = observed()
    change_steps(observation, 1, **{what: 0.123})
    found = first_finding(observation)
    assert found.kind is FindingType.UPDATE and found.step == 2
    assert (
        f"the {what.replace('_', ' ')} is 0.123, the reference's {getattr(observation.reference.steps[1], what):.12g}" in found.text
    )


def test_an_update_that_does_not_happen() -> None:
    observation = observed()
    for _, part in parts(observation, main_params(), QKV):
        part.values.copy_(part.select(observation.start[QKV]))
    found = first_finding(observation)
    assert found.kind is FindingType.UPDATE and found.place == f"{QKV} (layer 1)" and "no update reached them" in found.text


def test_an_update_that_is_too_large() -> None:
    observation = observed()
    for _, part in parts(observation, main_params(), QKV):
        start = part.select(observation.start[QKV])
        part.values.add_(part.values - start)
    assert "the change is 2.0x what it should be" in first_finding(observation).text, "sums over groups are right"


def test_weight_decay_where_none_belongs() -> None:
    observation = observed()
    for _, part in parts(observation, main_params(), NORM):
        part.values.sub_(1e-4 * observation.start[NORM])
    assert "differs by -0.0001 times the old weights: weight decay is wrong" in first_finding(observation).text


def test_parameters_that_did_not_get_the_update() -> None:
    observation = observed(DATA)
    stale = next(part for rank, part in parts(observation, lambda rank: rank.steps[0].parameters, QKV) if rank == 1)
    stale.values.copy_(observation.start[QKV])
    found = first_finding(observation)
    assert (
        found.kind is FindingType.REPLICAS
        and "the new values were not copied to the parameters" in found.text
        and found.ranks == (1,)
    )


def test_replicas_that_differ_in_a_bit() -> None:
    """Equal to rounding is not enough: they would drift apart."""
    observation = observed()
    part = next(part for rank, part in parts(observation, main_params(), NORM) if rank == 1)
    part.values[3] *= 1 + 2**-52
    found = first_finding(observation)
    assert (
        found.kind is FindingType.REPLICAS
        and found.group == "tensor"
        and found.ranks == (0, 1)
        and "not the same bits" in found.text
    )


def test_an_update_that_is_another_on_one_replica() -> None:
    """The ranks are told, which tells more than that the update is wrong."""
    observation = observed(DATA)
    for rank, part in parts(observation, main_params(), QKV):
        part.values.add_(1e-3 * rank)
    found = first_finding(observation)
    assert found.kind is FindingType.UPDATE and found.group == "data" and found.ranks == (1,) and found.names == (QKV,)
    assert "only on data rank 1; the data ranks hold different values" in found.text


def test_a_skipped_step() -> None:
    observation = observed()
    change_steps(observation, 0, skipped=True)
    assert "took the gradient for an overflow" in first_finding(observation).text


@pytest.mark.parametrize("number", [0, 2])
def test_an_evaluation_that_differs(number: int) -> None:
    observation = observed()

    def spoil(rank: RankObservation) -> RankObservation:
        evaluations = list(rank.evaluations)
        evaluations[number] *= 1.01
        return dataclasses.replace(rank, evaluations=evaluations)

    observation.ranks[:] = [spoil(rank) for rank in observation.ranks]
    found = first_finding(observation)
    assert found.kind is FindingType.EVALUATION and found.step == number
    assert "though training with the same weights agrees" in found.text and "dropout" in found.text


def test_a_run_that_is_too_short() -> None:
    observation = observed()
    for rank in observation.ranks:
        rank.steps.pop()
    assert "ranks made 1 steps, the reference 2: the run does not end where it should" in first_finding(observation).text


def test_rounding_that_adam_makes_an_update_of_is_no_difference() -> None:
    """Without rotary positions the true gradient of a key bias is zero. Its update is what rounding says, over Adam's epsilon."""
    observation = observed()
    name = "layers.1.attention.qkv.bias"
    plain = observation.reference.steps[0]
    noise = (plain.gradients[name] != 0) & (plain.gradients[name].abs() < 1e-12 * plain.grad_norm)
    assert 0 < int(noise.sum()) < len(noise)
    reach = plain.learning_rate * 1e-14 * plain.grad_norm / observation.config.optimizer.adam_eps
    for step in (0, 1):
        for _, part in parts(observation, main_params(step), name):
            part.values.add_(0.9 * reach * part.select(noise.double()))
        for _, part in parts(observation, parameters(step), name):
            part.values.add_(0.9 * reach * part.select(noise.double()))
    assert diagnose(observation).equal
    for _, part in parts(observation, main_params(1), name):
        part.values.add_(20 * reach * part.select(noise.double()) + 1e-9)
    assert first_finding(observation).kind is FindingType.UPDATE
