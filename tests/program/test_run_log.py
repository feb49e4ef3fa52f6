"""What a run tells: the log line, validation lines, metrics file, TensorBoard, timers, profiler."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.equality import number_differences
from tests.support.runs import TINY, arguments, losses, read_metrics, run

STEP_KEYS = {
    "iteration",
    "consumed_samples",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "elapsed_ms",
    "tokens_per_s",
    "tflops_per_device",
    "goodput",
}

LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration (?P<iteration>[ \d]{8})/(?P<of>[ \d]{8})"
    r" \| consumed samples: (?P<samples>[ \d]{12})"
    r" \| elapsed time per iteration \(ms\): (?P<ms>\d+\.\d)"
    r"(?: \| throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>\d+\.\d))?"
    r" \| learning rate: (?P<rate>\d\.\d{6}E[+-]\d\d)"
    r" \| global batch size: (?P<batch>[ \d]{5})"
    r"(?: \| lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d))?"
    r" \| loss scale: (?P<scale>\d+\.\d)"
    r"(?: \| grad norm: (?P<norm>\d+\.\d{3}))?"
    r"(?: \| num zeros: (?P<zeros>\d+\.\d))?"
    r"(?: \| params norm: (?P<params>\d+\.\d{3}))?"
    r" \| number of skipped iterations: (?P<skipped>[ \d]{3})"
    r" \| number of nan iterations: (?P<nans>[ \d]{3}) \|"
)


def _log_lines(said: str) -> list[dict[str, str]]:
    lines = [line for line in said.splitlines() if "] iteration " in line]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), f"not in the form of the training log: {lines}"
    return [match.groupdict() for match in found if match]


def test_the_log_line_and_the_metrics_file_agree(tmp_path: Path) -> None:
    """The first iteration is printed, then every second; the loss is the mean since the line before."""
    settings = {"train_iters": 5, "global_batch_size": 12}
    run(arguments(**settings, metrics_file=tmp_path / "each"))
    each = losses(tmp_path / "each")
    switches = {"log_throughput": True, "log_params_norm": True, "log_num_zeros_in_grad": True}
    said = run(arguments(**settings, **switches, log_interval=2, metrics_file=tmp_path / "second"))
    lines, metrics = _log_lines(said), read_metrics(tmp_path / "second")

    counts = [(int(line["iteration"]), int(line["of"]), int(line["samples"])) for line in lines]
    assert counts == [(1, 5, 12), (2, 5, 24), (4, 5, 48)]
    assert [line["lm_loss"] for line in metrics] == pytest.approx([each[0], each[1], (each[2] + each[3]) / 2], rel=1e-15)
    for line, values in zip(lines, metrics, strict=True):
        assert values.keys() >= STEP_KEYS
        assert line["loss"] == f"{values['lm_loss']:.6E}"
        assert line["rate"] == f"{values['learning_rate']:.6E}"
        assert line["norm"] == f"{values['grad_norm']:.3f}"
        assert line["params"] == f"{values['params_norm']:.3f}"
        assert line["zeros"] == f"{values['num_zeros']:.1f}"
        assert line["ms"] == f"{values['elapsed_ms']:.1f}"
        assert line["tflops"] == f"{values['tflops_per_device']:.1f}"
        assert (line["batch"], line["scale"], line["skipped"], line["nans"]) == ("   12", "1.0", "  0", "  0")


def test_fields_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    """Also the loss and the norm of an iteration that made no step."""
    said = run(arguments(train_iters=2, iterations_to_skip=(1,)))
    assert "across ranks" not in said, "timers of level 0, the default"
    left_out, made = _log_lines(said)
    assert left_out["loss"] is left_out["norm"] is None and left_out["skipped"] == "  1"
    assert made["loss"] and made["norm"] and made["skipped"] == "  0"
    assert made["tflops"] is made["zeros"] is made["params"] is None


def test_throughput_follows_from_the_time(tmp_path: Path) -> None:
    """Tokens of the interval / its time; model FLOPs / time / devices. With a batch that grows within the interval."""
    settings = {"train_iters": 4, "log_interval": 2, "rampup_batch_size": (4, 4, 8), "metrics_file": tmp_path / "metrics"}
    run(arguments(**settings), 2)
    metrics = read_metrics(tmp_path / "metrics")
    assert [line["consumed_samples"] for line in metrics] == [4, 8, 24]  # batches 4, 4, 8, 8
    hidden, sequence, layers, vocabulary = TINY["hidden_size"], TINY["seq_length"], TINY["num_layers"], TINY["vocab_size"] + 1
    # A multiply-add is 2 FLOPs, backward does twice the work of forward; attention (QK and AV) sees half of the square.
    per_token = 6 * (layers * 12 * hidden**2 + hidden * vocabulary) + 6 * layers * 2 * hidden * sequence / 2
    for line, samples, steps in zip(metrics, (4, 4, 16), (1, 1, 2), strict=True):
        seconds = line["elapsed_ms"] * steps / 1000
        assert line["tokens_per_s"] == pytest.approx(samples * sequence / seconds, rel=1e-9)
        assert line["tflops_per_device"] == pytest.approx(line["tokens_per_s"] * per_token / 2 / 1e12, rel=1e-9)


def test_evaluation_is_printed_and_recorded(tmp_path: Path) -> None:
    """At its interval and at the end of the run, once where they fall together; ln(PPL) is the loss."""
    said = run(arguments(train_iters=4, eval_iters=1, eval_interval=2, mtp_num_layers=1, metrics_file=tmp_path / "metrics"))
    found = re.findall(
        r"^(-+)\n validation loss at iteration (\d+)"
        r" \| lm loss value: (\d\.\d{6}E[+-]\d\d) \| lm loss PPL: (\d\.\d{6}E[+-]\d\d) \|"
        r" mtp loss value: (\d\.\d{6}E[+-]\d\d) \| \n\1$",
        said,
        re.MULTILINE,
    )
    recorded = [line for line in read_metrics(tmp_path / "metrics") if "validation_loss" in line]
    assert [(int(iteration), loss, mtp_loss) for _, iteration, loss, _, mtp_loss in found] == [
        (line["iteration"], f"{line['validation_loss']:.6E}", f"{line['validation_mtp_loss']:.6E}") for line in recorded
    ]
    assert [line["iteration"] for line in recorded] == [2, 4]
    assert all(math.log(float(perplexity)) == pytest.approx(float(loss), rel=1e-5) for _, _, loss, perplexity, _ in found)
    assert recorded[0]["validation_loss"] > recorded[1]["validation_loss"]


def test_tensorboard_has_megatrons_tags(tmp_path: Path) -> None:
    """Each by iteration and by samples, with the values of the metrics file; also at two stages, where the last has the loss."""
    run(
        arguments(
            train_iters=3,
            eval_iters=1,
            pipeline_model_parallel_size=2,
            log_layer_norms=True,
            log_num_zeros_in_grad=True,
            timing_log_level=1,
            log_timers_to_tensorboard=True,
            tensorboard_dir=tmp_path / "board",
            tensorboard_tags="megatron",
            metrics_file=tmp_path / "metrics",
        ),
        2,
    )
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    by_name = {"learning-rate": "learning_rate", "lm loss": "lm_loss", "loss-scale": "loss_scale", "grad-norm": "grad_norm"}
    others = ("batch-size", "iteration-time", "throughput", "num-zeros", "lm loss validation", "lm loss validation ppl")
    for tag in (*by_name, *others):
        assert {tag, f"{tag} vs samples"} <= tags
    *steps, evaluation = read_metrics(tmp_path / "metrics")
    for tag, name in by_name.items():
        values = [line[name] for line in steps]
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values, rel=1e-6)
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3]
        assert [event.step for event in events.Scalars(f"{tag} vs samples")] == [8, 16, 24]
    assert events.Scalars("lm loss validation")[0].value == pytest.approx(evaluation["validation_loss"], rel=1e-6)
    for name in ("grad-norm/layers.1", "weight-norm/embedding"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in steps], rel=1e-6)
    assert "forward-backward-time" in tags


@pytest.mark.parametrize(
    "option", [pytest.param("minmax", marks=pytest.mark.full("one of the others, which it joins")), "max", "all"]
)
def test_timers_of_all_ranks(option: str) -> None:
    """The parts of a step, a line each, in the form that is asked for."""
    said = run(arguments(train_iters=1, timing_log_level=2, timing_log_option=option), 2)
    title, entry = {
        "minmax": ("(min, max) time across ranks (ms):", r"    forward-backward \.+: \(\d+\.\d\d, \d+\.\d\d\)"),
        "max": ("max time across ranks (ms):", r"    forward-backward \.+: \d+\.\d\d"),
        "all": ("times across ranks (ms):", r"  forward-backward:\n     rank  0: \d+\.\d\d\n     rank  1: \d+\.\d\d"),
    }[option]
    assert f"\n{title}\n" in said
    assert re.search(f"^{entry}$", said, re.MULTILINE)
    assert all(f"{name}" in said for name in ("grads-reduce", "optimizer", "batch-generator"))


def test_a_profile_of_some_steps_on_some_ranks(tmp_path: Path) -> None:
    """A Chrome trace from each rank that is named; the run goes on after the window."""
    window = {"profile": True, "profile_step_start": 2, "profile_step_end": 3, "profile_ranks": (1,), "profile_dir": tmp_path}
    said = run(arguments(train_iters=3, **window, num_workers=2), 2, gloo=True)
    assert "done after 3 iterations" in said
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["trace_rank1_step2-3.json"]
    events = json.loads((tmp_path / "trace_rank1_step2-3.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("addmm" in name or "aten::mm" in name for name in names)
    assert any("all_reduce" in name or "allreduce" in name for name in names), "communication is part of a step"


def test_norms_and_the_z_loss_at_a_parallel_layout_are_those_of_one_rank(tmp_path: Path) -> None:
    """Parameters, zeros of the gradient (without padding), and each layer's norms; the parts' squares add up to the whole's.

    So is the z-loss, which has a field of its own; the loss beside it is the cross entropy.
    """
    switches: dict[str, Any] = {
        "fp64": True,
        "train_iters": 2,
        "log_params_norm": True,
        "log_layer_norms": True,
        "log_num_zeros_in_grad": True,
    }
    # Untied, so that the gradient of a token that does not occur is exactly zero; no key biases, whose gradient is almost zero.
    switches |= {"untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "seq_length": 8, "z_loss_coeff": 0.01}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    said = run(arguments(**switches, metrics_file=tmp_path / "one"))
    z_loss = read_metrics(tmp_path / "one")[0]["z_loss"]
    assert f"| z loss: {z_loss:.6E} |" in said
    run(arguments(**switches | {"z_loss_coeff": 0.0, "train_iters": 1}, metrics_file=tmp_path / "without"))
    said = run(arguments(**switches, **layout, loss_chunk_tokens=3, tp_comm_overlap=True, metrics_file=tmp_path / "four"), 4)
    why = "symmetric memory needs CUDA, and the device is cpu"
    assert f"communication of tensor ranks overlaps with matrix products: a ring of sends and receives: {why}" in said
    one, four = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "four")
    assert one[0].keys() == four[0].keys()
    (without,) = read_metrics(tmp_path / "without")
    assert "z_loss" not in without and one[0]["lm_loss"] == without["lm_loss"]
    names = [name for name in one[0] if "norm" in name]
    assert {"params_norm", "grad_norm", "grad-norm/layers.1", "weight-norm/output", "weight-norm/final_norm"} <= set(names)
    for a, b in zip(one, four, strict=True):
        assert b["z_loss"] == pytest.approx(a["z_loss"], rel=1e-12) and b["lm_loss"] == pytest.approx(a["lm_loss"], rel=1e-12)
        assert not number_differences("norms", [b[name] for name in names], [a[name] for name in names], 1e-10)
        assert a["num_zeros"] == b["num_zeros"] and a["num_zeros"] % TINY["hidden_size"] == 0 and a["num_zeros"] > 0
        for total, part in (("grad_norm", "grad-norm/"), ("params_norm", "weight-norm/")):
            parts = [value for name, value in a.items() if name.startswith(part)]
            assert len(parts) == TINY["num_layers"] + 3
            assert math.hypot(*parts) == pytest.approx(a[total], rel=1e-12)


def test_norms_do_not_depend_on_the_loss_scale(tmp_path: Path) -> None:
    """In float16 gradients are scaled; what is logged is not."""
    run(arguments(fp16=True, initial_loss_scale=2**12, train_iters=1, log_layer_norms=True, metrics_file=tmp_path / "fp16"))
    run(arguments(train_iters=1, log_layer_norms=True, metrics_file=tmp_path / "fp32"))
    half, single = read_metrics(tmp_path / "fp16")[0], read_metrics(tmp_path / "fp32")[0]
    names = [name for name in single if "norm" in name]
    assert "grad_norm" in names and "grad-norm/embedding" in names
    assert [half[name] for name in names] == pytest.approx([single[name] for name in names], rel=0.01)
