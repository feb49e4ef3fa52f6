"""The measure of equality: passes what is equal up to rounding, fails what is not, and says what is wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.support.equality import assert_equal_runs, assert_equal_tensors, assert_same_bits
from tests.support.reference_runs import ReferenceRun


def run(**changes: object) -> ReferenceRun:
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, torch.Tensor]:
        return {name: torch.randn(8, 4, generator=generator, dtype=torch.float64) for name in ("first", "second", "third")}

    made = ReferenceRun(losses=[3.0, 2.0], grad_norms=[1.5, 0.5], first_gradients=tensors(), weights_after=tensors())
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def message(actual: ReferenceRun) -> str:
    with pytest.raises(AssertionError) as error:
        assert_equal_runs(actual, run())
    return str(error.value)


def test_equal_up_to_rounding() -> None:
    reference = run()
    near = {name: w * (1 + 9e-11) for name, w in reference.weights_after.items()}
    assert_equal_runs(run(losses=[3.0 * (1 + 9e-11), 2.0], weights_after=near), reference)


def test_a_small_error_in_one_tensor_is_seen() -> None:
    weights = dict(run().weights_after)
    weights["second"] = weights["second"] * (1 + 1.1e-10)
    text = message(run(weights_after=weights))
    assert "weights_after differ in 1 of 3 tensors" in text and "second" in text and "equal: first, third" in text


def test_a_single_element_is_compared_at_the_scale_of_its_tensor() -> None:
    weights = {"w": torch.ones(1000, dtype=torch.float64)}
    near = {"w": weights["w"].clone()}
    near["w"][7] += 1e-9  # 3e-11 of the tensor's norm
    assert_equal_tensors(near, weights)
    near["w"][7] += 1e-8
    with pytest.raises(AssertionError, match="1 rows from 7 on of 1000"):
        assert_equal_tensors(near, weights)


def test_constant_ratio_is_named() -> None:
    gradients = {name: g * (2 if name == "first" else 1 / 3) for name, g in run().first_gradients.items()}
    text = message(run(first_gradients=gradients))
    lines = text.splitlines()
    assert lines[0] == "first_gradients differ in 3 of 3 tensors, the worst first:"
    assert lines[1].startswith("  first ") and "2.0x the reference" in lines[1]  # the worst: 100 % off, the others 67 %
    assert text.count("0.333333x the reference") == 2


def test_a_lost_tensor_is_zero_times_the_reference() -> None:
    gradients = dict(run().first_gradients)
    gradients["third"] = torch.zeros(8, 4, dtype=torch.float64)
    assert "0.0x the reference" in message(run(first_gradients=gradients))


def test_wrong_rows_are_named() -> None:
    weights = {name: w.clone() for name, w in run().weights_after.items()}
    weights["third"][4:] += 1
    text = message(run(weights_after=weights))
    assert "rows 4 to 7 of 8" in text and "x the reference" not in text


def test_negligible_tensors_are_compared_by_size() -> None:
    reference = {"large": torch.ones(4, dtype=torch.float64), "noise": torch.full((4,), 1e-17, dtype=torch.float64)}
    assert_equal_tensors({**reference, "noise": -3 * reference["noise"]}, reference)
    with pytest.raises(AssertionError, match="noise"):
        assert_equal_tensors({**reference, "noise": torch.full((4,), 1e-11, dtype=torch.float64)}, reference)


@pytest.mark.parametrize(("size", "allowed"), [(1.0, 1e-10), (1e-3, 1e-13), (1e-8, 1e-14), (2e-12, 1e-14), (1e-13, 1e-12)])
def test_no_tensor_is_held_to_digits_that_rounding_has_taken(size: float, allowed: float) -> None:
    """A sum of numbers as large as the global norm is off by parts of that norm, however small it comes out."""
    reference = {"large": torch.ones(1, dtype=torch.float64), "small": torch.full((1,), size, dtype=torch.float64)}
    allowed *= math.hypot(1.0, size)  # in parts of the norm of both
    assert_equal_tensors({**reference, "small": reference["small"] + 0.6 * allowed}, reference)
    with pytest.raises(AssertionError, match="small"):
        assert_equal_tensors({**reference, "small": reference["small"] + 1.6 * allowed}, reference)


def test_tensors_that_are_exactly_zero_must_stay_so_among_zeros() -> None:
    zeros = {"a": torch.zeros(3, dtype=torch.float64)}
    assert_equal_tensors(zeros, zeros)
    with pytest.raises(AssertionError, match="from zero"):
        assert_equal_tensors({"a": torch.ones(3)}, zeros)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_differs(bad: float) -> None:
    weights = {name: w.clone() for name, w in run().weights_after.items()}
    weights["first"][0, 0] = bad
    assert "not finite" in message(run(weights_after=weights))
    assert "losses differ in 1 of 2 steps" in message(run(losses=[3.0, bad]))


def test_names_shapes_and_steps_must_agree() -> None:
    weights = dict(run().weights_after)
    weights["fourth"] = weights.pop("first")
    weights["second"] = weights["second"].T
    text = message(run(weights_after=weights, losses=[3.0]))
    assert "missing first" in text and "not in the reference fourth" in text
    assert "shape [4, 8], reference [8, 4]" in text
    assert "losses: 1 steps, the reference has 2" in text


def test_losses_and_norms_are_told_with_full_digits() -> None:
    text = message(run(losses=[3.0, 2.0 + 1e-9], grad_norms=[1.5, 0.5 + 1e-10]))
    assert "step 2: 2.000000001, reference 2.0 (relative difference 5.00e-10)" in text
    assert "grad_norms differ in 1 of 2 steps" in text


def test_a_run_without_steps_is_refused() -> None:
    empty = run(losses=[], grad_norms=[])
    with pytest.raises(AssertionError, match="proves nothing"):
        assert_equal_runs(empty, empty)


def test_the_same_bits_are_the_same_everywhere() -> None:
    assert_same_bits(run(), run())
    weights = {name: w.clone() for name, w in run().weights_after.items()}
    weights["second"].view(-1)[0] *= 1 + 2**-52
    with pytest.raises(AssertionError, match="losses, grad_norms, weights_after: second$"):
        assert_same_bits(run(losses=[3.0, 2.0 + 2**-51], grad_norms=[1.5 + 2**-52, 0.5], weights_after=weights), run())
