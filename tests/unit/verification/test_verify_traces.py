"""Where two traces part: made-up ones, and those of the tool's own runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lab.audit.signature import compute_signature, to_trace_signature
from megatron_lab.audit.trace_file import Signature, TraceHeader, TraceRun, TraceStep
from megatron_lab.commands.verify_layout import main
from megatron_lab.proofs.traces import TraceComparison, build_traces_json, compare, compare_files, format_traces, read_run
from megatron_lab.proofs.verify import build_trace, write_trace
from tests.support.verify_observations import DATA, STAGES, observed

SHAPES = {
    "embedding.word.weight": [16, 8],
    "layers.0.mlp.up.weight": [12, 8],
    "layers.1.mlp.up.weight": [12, 8],
    "final_norm.weight": [8],
}
STEPS = 5


def tensors(seed: int, noise: float = 0.0, noise_seed: int = 99) -> dict[str, torch.Tensor]:
    """Of norm about the root of their size, with relative noise."""
    generator, other = (torch.Generator().manual_seed(n) for n in (seed, noise_seed))
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: t + noise * torch.randn(t.shape, generator=other, dtype=torch.float64) for name, t in made.items()}


def signed(values: dict[str, torch.Tensor]) -> dict[str, Signature]:
    return {name: to_trace_signature(compute_signature(name, value)) for name, value in values.items()}


def settings(dropout: float = 0.0, micro_batch_size: int = 2, lr: float = 1e-3) -> dict[str, dict[str, Any]]:
    """What a trace tells of its run, as far as it is read."""
    model = {"attention_dropout": dropout, "hidden_dropout": 0.0}
    return {"optimizer": {"lr": lr}, "model": model, "training": {"micro_batch_size": micro_batch_size}}


def trace(*, noise: list[float] | None = None, dtype: str = "float64", first: int = 1) -> TraceRun:
    """A run of five steps; `noise` is that of the gradients of each."""
    header = TraceHeader(settings(), {"tp": 1, "cp": 1, "dp": 1, "pp": 1}, [(0, [0, 1])], dtype, "2", 16, SHAPES)
    run = TraceRun(header, first - 1, signed(tensors(0)))
    for number in range(STEPS):
        far = noise[number] if noise else 0.0
        run.steps.append(
            TraceStep(
                iteration=first + number,
                samples=4,
                consumed_samples=4 * (first + number),
                loss=3.0 - 0.1 * number,
                tokens=100.0,
                grad_norm=2.0,
                learning_rate=1e-3,
                weight_decay=0.1,
                loss_scale=1.0,
                skipped=False,
                gradients=signed(tensors(10 + number, far)),
                weights=signed(tensors(50 + number)),
            )
        )
    return run


def changed(run: TraceRun, step: int, **changes: object) -> TraceRun:
    steps = list(run.steps)
    steps[step] = dataclasses.replace(steps[step], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(run, steps=steps)


def verdict(found: TraceComparison) -> str:
    return format_traces(found, "A", "B")[0]


@pytest.mark.parametrize(("dtype", "noise"), [("float64", 1e-14), ("float32", 1e-5), ("bfloat16", 1e-2)])
def test_rounding_is_equal(dtype: str, noise: float) -> None:
    found = compare(trace(noise=[noise] * STEPS, dtype=dtype), trace(dtype=dtype))
    assert not found.differs and not found.first and found.steps == (1, 2, 3, 4, 5)
    assert verdict(found) == "EQUAL to rounding: steps 1 to 5 of A and B"
    assert found.max_difference is not None and 0.1 * noise < found.max_difference.relative < 10 * noise


@pytest.mark.parametrize(("dtype", "noise"), [("float64", 1e-7), ("float32", 1e-1), ("bfloat16", 3.0)])
def test_the_first_step_that_jumps_is_found(dtype: str, noise: float) -> None:
    found = compare(trace(noise=[0, 0, noise, noise, noise], dtype=dtype), trace(dtype=dtype))
    assert found.differs and {part.step for part in found.first} == {3}
    assert found.first[0].name == "final_norm.weight"  # the first in the order of backward


def test_what_grows_bit_by_bit_is_rounding() -> None:
    found = compare(trace(noise=[0.02, 0.08, 0.3, 1.0, 3.0], dtype="bfloat16"), trace(dtype="bfloat16"))
    assert found.first and not found.differs and verdict(found).startswith("DRIFT apart slowly, as rounding does")


def test_a_factor_is_told() -> None:
    run = trace()
    doubled = dict(run.steps[1].gradients)
    doubled["layers.1.mlp.up.weight"] = tuple(2 * number for number in doubled["layers.1.mlp.up.weight"])
    found = compare(changed(run, 1, gradients=doubled), trace())
    assert [part.name for part in found.first] == ["layers.1.mlp.up.weight"]
    assert verdict(found).startswith("DIVERGE: step 2: gradient of layers.1.mlp.up.weight differs by 1.0e+00")
    assert verdict(found).endswith("layer 1: 2.0x the other")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(samples=8), "the number of samples differs"),
        (dict(tokens=99.0), "the count of tokens differs by 1.0e-02 (allowed 1e-12): 99 and 100, so the batches are not the same"),
        (dict(loss=2.81), "the loss differs"),
        (dict(loss=math.nan), "the loss differs by all of it"),
        (dict(grad_norm=2.1), "the gradient norm differs by 5.0e-02"),
        (dict(learning_rate=2e-3), "the learning rate differs by 1.0e+00"),
        (dict(skipped=True, gradients={}), "the update differs by all of it"),
        (dict(grad_norm=math.inf), "the gradient norm differs by all of it"),
    ],
)
def test_what_differs_is_named(changes: dict[str, object], says: str) -> None:
    found = compare(changed(trace(), 2, **changes), trace())
    assert found.differs and found.first[0].step == 3 and says in verdict(found)


OVERFLOWED: dict[str, Any] = {"skipped": True, "grad_norm": math.nan, "gradients": {}}
"""What a trace has of a step that was skipped."""


def test_a_step_that_both_skipped_has_no_gradient_to_compare(tmp_path: Path) -> None:
    """Read from files, too, where null stands for the norm."""
    run = changed(changed(trace(dtype="float16"), 0, **OVERFLOWED), 1, **OVERFLOWED)
    write_trace(run, str(tmp_path / "t"))
    for found in (compare(run, run), compare_files(str(tmp_path / "t"), str(tmp_path / "t"))):
        lines = format_traces(found, "A", "B")
        assert not found.first and found.skipped == (1, 2) and not found.nonfinite_steps and lines[0].startswith("EQUAL")
        assert "  both skipped the update of 2 steps, for a gradient that overflowed and is not compared: steps 1 and 2" in lines
    assert compare(changed(run, 1, loss=2.0), run).differs  # what a skipped step does have is compared
    assert compare(changed(run, 1, weights=signed(tensors(7))), run).differs


@pytest.mark.parametrize("first_skips", [True, False])
def test_a_step_that_one_run_skipped_is_told_as_such(first_skips: bool) -> None:
    pair = changed(trace(), 1, **OVERFLOWED), trace()
    found = compare(*(pair if first_skips else pair[::-1]))
    skipped, other = ("the first", "the reference") if first_skips else ("the reference", "the first")
    assert verdict(found).endswith(f": {skipped} skipped it, for a gradient that overflowed, and {other} did not")
    assert found.differs and [part.quantity for part in found.first] == ["the update"] and not found.skipped


def spoilt(tensors: dict[str, Signature], name: str, *numbers: int) -> dict[str, Signature]:
    """With some numbers of one tensor's signature not finite."""
    return {**tensors, name: tuple(math.nan if i in numbers else number for i, number in enumerate(tensors[name]))}


def test_what_is_not_finite_in_both_is_equal_and_told() -> None:
    run = trace()
    for changes in (
        dict(loss=math.nan),
        dict(grad_norm=math.nan),
        dict(gradients=spoilt(run.steps[2].gradients, "final_norm.weight", 0, 1, 2, 3, 4)),
        dict(weights=spoilt(run.steps[2].weights, "layers.0.mlp.up.weight", 0)),
        dict(weights=spoilt(run.steps[2].weights, "layers.0.mlp.up.weight", 1, 4)),
    ):
        both = changed(run, 2, **changes)
        found = compare(both, both)
        assert not found.first and found.nonfinite_steps == (3,), changes
        assert "  not finite in either trace, which counts as equal: a value in step 3" in format_traces(found, "A", "B")
        for pair in ((both, run), (run, both)):
            assert {part.step for part in compare(*pair).first} == {3}, changes


def test_a_tensor_that_is_not_finite_hides_no_other() -> None:
    """Not in the scale of the others, and not by its own numbers that are finite."""
    run = trace()
    gradients = spoilt(run.steps[2].gradients, "final_norm.weight", 0)
    both = changed(run, 2, gradients=gradients)
    off = dict(gradients)
    off["layers.1.mlp.up.weight"] = tuple(number + 1 for number in off["layers.1.mlp.up.weight"])
    off["final_norm.weight"] = tuple(number + 1 for number in off["final_norm.weight"])
    found = compare(changed(run, 2, gradients=off), both)
    assert [part.name for part in found.first] == ["final_norm.weight", "layers.1.mlp.up.weight"]


def test_numbers_of_any_size_are_compared() -> None:
    """Squares of them would be beyond the largest number."""
    run = trace()
    huge = {**run.steps[0].gradients, "final_norm.weight": (1e200, 1e200, -2e200, 3e200, 5e200)}
    found = compare(changed(run, 0, gradients=huge), run)
    assert [part.name for part in found.first] == ["final_norm.weight"] and found.first[0].relative > 1e199


def test_steps_that_only_one_has_are_told() -> None:
    run = trace()
    cut, late = dataclasses.replace(run, steps=run.steps[:2]), dataclasses.replace(run, steps=[run.steps[0], *run.steps[2:]])
    found = compare(cut, run)
    assert not found.differs and found.unmatched_steps == ((), (3, 4, 5))
    lines = format_traces(found, "A", "B")
    assert "  only B (the reference) has steps 3 to 5: not compared" in lines and not any("only A" in line for line in lines)
    lines = format_traces(compare(cut, late), "A", "B")
    assert "  only A (the first) has step 2: not compared" in lines
    assert not any("only" in line for line in format_traces(compare(run, run), "A", "B"))


def test_as_json() -> None:
    run = trace()
    cut = changed(changed(dataclasses.replace(run, steps=run.steps[:4]), 0, **OVERFLOWED), 2, loss=math.inf)
    made = build_traces_json(compare(cut, changed(run, 0, **OVERFLOWED)), "A", "B")
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert (made["equal"], made["drifts"], made["traces"], made["steps"]) == (False, False, ["A", "B"], [1, 2, 3, 4])
    assert made["steps_of_one"] == [[], [5]] and made["skipped_in_both"] == [1]
    assert made["first"] == [{"step": 3, "what": "the loss", "parameter": None, "relative": None, "allowed": 1e-10}]
    equal = build_traces_json(compare(run, run), "A", "A")
    assert equal["equal"] and equal["first"] == [] and equal["largest"]["relative"] == 0.0


@pytest.mark.parametrize(
    ("line", "name", "value", "says"),
    [
        (2, "loss", "abc", "the value 'abc' of loss in the trace is not a number"),
        (2, "tokens", True, "the value True of tokens in the trace is not a number"),
        (2, "iteration", None, "the value None of iteration in the trace is not an integer"),
        (2, "samples", 1.5, "the value 1.5 of samples in the trace is not an integer"),
        (2, "skipped", "no", "the value 'no' of skipped in the trace is neither true nor false"),
        (2, "grad_norm", 10**400, "OverflowError"),
        (2, "weights", {"final_norm.weight": [1, 2, 3, 4, "5"]}, "the value '5' of final_norm.weight in the trace is not a number"),
        (
            2,
            "gradients",
            {"final_norm.weight": [1]},
            "the signature of the tensor final_norm.weight (values that summarize the tensor) has 1 values instead of 5",
        ),
        (2, "colour", 3, "KeyError('colour')"),
        (1, "iteration", "0", "the value '0' of iteration in the trace is not an integer"),
        (1, "weights", {"final_norm.weight": [[], 2, 3, 4, 5]}, "the value [] of final_norm.weight in the trace is not a number"),
        (0, "parameters", {"final_norm.weight": ["8"]}, "the value '8' of final_norm.weight in the trace is not an integer"),
        (0, "layout", {"tp": "2"}, "the value '2' of tp in the trace is not an integer"),
    ],
)
def test_a_file_whose_numbers_are_none_is_told_in_words(
    line: int, name: str, value: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_trace(trace(), str(good))
    lines = [json.loads(text) for text in good.read_text().splitlines()]
    lines[line][name] = value
    bad.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert main(["--trace", str(bad), "--trace", str(good)]) == 2
    told = capsys.readouterr()
    assert not told.out and f"trace {bad}, line {line + 1}: not in the format of --save-trace" in told.err and says in told.err


def test_start_weights_that_differ_come_first() -> None:
    run = trace()
    other = dataclasses.replace(run, weights=signed(tensors(1)))
    found = compare(other, run)
    assert verdict(found).startswith("DIVERGE: step 0: start weight of embedding.word.weight differs")


def test_a_batch_that_differs_comes_before_its_loss() -> None:
    found = compare(changed(trace(), 0, tokens=50.0, loss=9.0), trace())
    assert [part.quantity for part in found.first] == ["the count of tokens", "the loss"]


def test_weights_in_few_bits_may_be_a_whole_step_apart() -> None:
    """Adam makes a step this way or that of a gradient that is only rounding; in float64 it does not."""
    apart = signed({name: t + 0.8 * torch.ones_like(t) for name, t in tensors(50).items()})
    for dtype, parts in (("bfloat16", False), ("float64", True)):
        run = changed(trace(dtype=dtype), 0, learning_rate=0.5)
        assert compare(changed(run, 0, weights=apart), run).differs is parts
        assert compare(changed(run, 0, weights=signed({name: 4 * t for name, t in tensors(50).items()})), run).differs


def test_other_models_and_other_steps_are_refused() -> None:
    run = trace()
    with pytest.raises(ValueError, match=r"different models: final_norm.weight has the shape \[9\] in one and \[8\]"):
        compare(
            dataclasses.replace(run, header=dataclasses.replace(run.header, parameters={**SHAPES, "final_norm.weight": [9]})), run
        )
    with pytest.raises(ValueError, match="different models: only one has output.weight"):
        compare(dataclasses.replace(run, header=dataclasses.replace(run.header, parameters={**SHAPES, "output.weight": [9]})), run)
    with pytest.raises(ValueError, match="no step in common: steps 1 to 5 and 11 to 15"):
        compare(run, trace(first=11))


def test_how_the_runs_were_set_up_is_told() -> None:
    run = trace()
    header = dataclasses.replace(run.header, settings=settings(lr=2e-3), layout={"tp": 2, "cp": 1, "dp": 1, "pp": 1})
    lines = format_traces(compare(dataclasses.replace(run, header=header), run), "A", "B")
    assert "  --lr differs: 0.002 and 0.001" in lines and any("layout differs: tp 2" in line for line in lines)


def test_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    """Steps that were done again count as they were done last."""
    run, again = trace(), trace(first=4)
    write_trace(changed(run, 4, loss=7.0), str(tmp_path / "a"))
    write_trace(again, str(tmp_path / "b"))
    (tmp_path / "a").write_text((tmp_path / "a").read_text() + (tmp_path / "b").read_text() + '{"kind": "st')
    whole = read_run(str(tmp_path / "a"))
    assert [step.iteration for step in whole.steps] == [1, 2, 3, 4, 5, 6, 7, 8] and whole.steps[4].loss != 7.0
    write_trace(run, str(tmp_path / "c"))
    assert compare_files(str(tmp_path / "a"), str(tmp_path / "c")).differs  # from step 4 on


def test_the_traces_of_two_layouts_are_equal(tmp_path: Path) -> None:
    for name, flags in (("stages", STAGES), ("data", DATA)):
        write_trace(build_trace(observed(flags)), str(tmp_path / name))
    found = compare_files(str(tmp_path / "stages"), str(tmp_path / "data"))
    lines = format_traces(found, "stages", "data")
    assert not found.differs and lines[0].startswith("EQUAL"), lines
    assert any("layout differs" in line and "pp 2" in line for line in lines)


def test_runs_with_other_dropout_masks_are_not_compared() -> None:
    def run(dropout: float, tp: int, micro_batch_size: int = 2) -> TraceRun:
        made = trace()
        header = dataclasses.replace(
            made.header, settings=settings(dropout, micro_batch_size), layout={**made.header.layout, "tp": tp}
        )
        return dataclasses.replace(made, header=header)

    assert not compare(run(0.0, 2, 4), run(0.0, 1)).differs and not compare(run(0.1, 2), run(0.1, 2)).differs
    with pytest.raises(ValueError, match=r"dropout, which draws other masks at another tensor-parallel size \(2 and 1\)"):
        compare(run(0.1, 2), run(0.1, 1))
    with pytest.raises(ValueError, match=r"another micro-batch size \(2 and 4\). Repeat both with --attention-dropout 0"):
        compare(run(0.1, 2), run(0.1, 2, 4))
