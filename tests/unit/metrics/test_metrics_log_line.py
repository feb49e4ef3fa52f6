"""The lines that people parse, byte for byte."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from megatron.metrics.log_line import (
    LogLineValues,
    format_compact,
    format_duration,
    format_megatron_line,
    format_progress_bar,
    format_short_line,
    format_short_validation_line,
    format_time,
    format_validation_lines,
)

VALUES: dict[str, Any] = {
    "time": datetime(2026, 6, 11, 10, 0, 0, 123456),
    "iteration": 100,
    "train_iterations": 1000,
    "consumed_samples": 3200,
    "elapsed_ms": 250.123,
    "learning_rate": 1.5e-4,
    "global_batch_size": 32,
    "lm_loss": 9.123456,
    "loss_scale": 1.0,
    "grad_norm": 1.2341,
    "num_skipped": 0,
    "num_nans": 0,
}


def test_line_with_throughput() -> None:
    assert format_megatron_line(LogLineValues(**VALUES, tflops_per_device=41.23)) == (
        " [2026-06-11 10:00:00.123456] iteration      100/    1000 | consumed samples:         3200 |"
        " elapsed time per iteration (ms): 250.1 | throughput per GPU (TFLOP/s/GPU): 41.2 | learning rate: 1.500000E-04 |"
        " global batch size:    32 | lm loss: 9.123456E+00 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_line_with_all_optional_fields_and_a_whole_second() -> None:
    values = VALUES | {"time": datetime(2026, 6, 11, 10, 0, 0), "num_skipped": 12, "num_nans": 3, "loss_scale": 65536.0}
    assert format_megatron_line(LogLineValues(**values, z_loss=0.000123, num_zeros=7.0, params_norm=12.3456)) == (
        " [2026-06-11 10:00:00.000000] iteration      100/    1000 | consumed samples:         3200 |"
        " elapsed time per iteration (ms): 250.1 | learning rate: 1.500000E-04 |"
        " global batch size:    32 | lm loss: 9.123456E+00 | z loss: 1.230000E-04 | loss scale: 65536.0 | grad norm: 1.234 |"
        " num zeros: 7.0 | params norm: 12.346 | number of skipped iterations:  12 | number of nan iterations:   3 |"
    )


def test_line_of_an_interval_without_an_update() -> None:
    assert format_megatron_line(LogLineValues(**VALUES | {"lm_loss": None, "grad_norm": None})) == (
        " [2026-06-11 10:00:00.123456] iteration      100/    1000 | consumed samples:         3200 |"
        " elapsed time per iteration (ms): 250.1 | learning rate: 1.500000E-04 |"
        " global batch size:    32 | loss scale: 1.0 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_validation_lines() -> None:
    rule, line, end = format_validation_lines(1000, 2.0)
    assert line == " validation loss at iteration 1000 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == end == "-" * (len(line) + 1)
    with_depths = format_validation_lines(1000, 2.0, mtp_loss=3.0)[1]
    assert with_depths == f"{line}mtp loss value: 3.000000E+00 | "


def test_validation_of_the_test_split_and_of_a_hopeless_loss() -> None:
    _, line, _ = format_validation_lines(5, 1000.0, "test")
    expected = f"{math.exp(20):.6E}"
    assert line == f" validation loss at iteration 5 on test set | lm loss value: 1.000000E+03 | lm loss PPL: {expected} | "


def test_the_short_line() -> None:
    """What is asked for is in it; what is as usual is not; a CPU's few FLOPs have their own unit."""
    values = VALUES | {"train_iterations": 5000, "lm_loss": 3.4125, "learning_rate": 3e-4, "tokens_per_s": 41230.0}
    assert format_short_line(LogLineValues(**values, mfu=0.384, remaining_s=8040.0)) == (
        "it  100/5000 | loss 3.413 | norm 1.23 | lr 3.00e-4 | 41.2k tok/s | 38 % MFU | 2 h 14 min left"
    )
    for seconds, text in ((0.02, "| < 1 s left"), (70.0, "| < 1 min left")):
        assert format_short_line(LogLineValues(**values, remaining_s=seconds, is_remaining_bound=True)).endswith(text)
    odd = VALUES | {
        "lm_loss": None,
        "grad_norm": None,
        "num_skipped": 2,
        "num_nans": 1,
        "loss_scale": 65536.0,
        "params_norm": 12.345,
    }
    assert format_short_line(LogLineValues(**odd, tflops_per_device=0.0123)) == (
        "it  100/1000 | loss scale 65536 | weights' norm 12.35 | lr 1.50e-4 | 12.3 GFLOP/s | 2 skipped | 1 NaN"
    )
    assert format_short_validation_line(1000, 2.0) == ["validation at it 1000 | loss 2.000 | perplexity 7.389"]
    assert format_short_validation_line(5, 2.0, "test", mtp_loss=3.0) == [
        "test at it 5 | loss 2.000 | perplexity 7.389 | mtp loss 3.000"
    ]


def test_numbers_for_people() -> None:
    assert [format_compact(each) for each in (0.0, 7.5, 999.4, 999.6, 41230.0, 1.5e9, 3e12, 4e16)] == [
        *("0", "7.5", "999", "1k", "41.2k", "1.5B", "3T", "40000T")
    ]
    times = (0.4, 59.4, 59.9, 3500.0, 3599.0, 8040.0, 86390.0, 90000.0, 1e7)
    assert [format_duration(each) for each in times] == [
        *("0 s", "59 s", "1 min", "58 min", "1 h 00 min", "2 h 14 min", "1 d 0 h", "1 d 1 h", "115 d 18 h")
    ]
    assert (
        format_progress_bar(0.5, 17) == "━━━━━─────  50 %" and format_progress_bar(1.0, 17, ascii_only=True) == "########## 100 %"
    )


def test_a_time_has_its_zone() -> None:
    """That of the time, or of the machine, as the difference from UTC."""
    time = datetime(2026, 11, 30, 14, 5, 9, 250_000, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert format_time(time) == "2026-11-30 14:05:09 UTC+05:30"
    assert format_time(time.astimezone(UTC), "minutes") == "2026-11-30 08:35 UTC"
    assert format_time(time.astimezone(timezone(timedelta(hours=-3)))) == "2026-11-30 05:35:09 UTC-03:00"
    local = format_time(datetime(2026, 1, 1))
    assert local.startswith("2026-01-01 00:00:00 UTC")
