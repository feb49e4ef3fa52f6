"""Loss scales: the dynamic one against a model that looks at the whole history."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.grad_scaler import DynamicGradScaler, GradScaler, LossScaleError, make_grad_scaler


def scale_from_history(history: list[bool], initial: float, interval: int, hysteresis: int) -> float:
    """The scale after a history of overflows, worked out anew from the last complete interval without one."""
    scale = initial
    overflows_since_refill = clean = 0
    for overflow in history:
        clean = 0 if overflow else clean + 1
        if overflow:
            overflows_since_refill += 1
            if overflows_since_refill >= hysteresis:
                scale /= 2
        elif clean % interval == 0:
            overflows_since_refill = 0
            scale *= 2
    return scale


@given(history=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 5), hysteresis=st.integers(1, 4))
def test_dynamic_scale_follows_the_plain_model(history: list[bool], interval: int, hysteresis: int) -> None:
    scaler = DynamicGradScaler(1.0, min_scale=2.0**-100, growth_interval=interval, hysteresis=hysteresis)
    for n, overflow in enumerate(history, start=1):
        scaler.update(overflow)
        assert scaler.scale == scale_from_history(history[:n], 1.0, interval, hysteresis)


@given(
    history=st.lists(st.booleans(), max_size=40),
    cut=st.integers(0, 40),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
)
def test_state_through_json_continues_exactly(history: list[bool], cut: int, interval: int, hysteresis: int) -> None:
    def make() -> DynamicGradScaler:
        return DynamicGradScaler(1.0, min_scale=2.0**-100, growth_interval=interval, hysteresis=hysteresis)

    whole, first, second = make(), make(), make()
    for overflow in history[:cut]:
        whole.update(overflow)
        first.update(overflow)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    for overflow in history[cut:]:
        whole.update(overflow)
        second.update(overflow)
    assert second.state_dict() == whole.state_dict()


def test_one_clean_step_does_not_refill_the_hysteresis() -> None:
    scaler = DynamicGradScaler(1024.0, min_scale=1.0, growth_interval=3, hysteresis=2)
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 512.0
    scaler.update(True)  # every further overflow too
    assert scaler.scale == 256.0
    for overflow in (False, False, False):  # a full interval: grows and refills
        scaler.update(overflow)
    assert scaler.scale == 512.0
    scaler.update(True)
    assert scaler.scale == 512.0


def test_the_scale_never_falls_below_its_minimum() -> None:
    scaler = DynamicGradScaler(100.0, min_scale=70.0, growth_interval=1, hysteresis=1)
    scaler.update(False)
    assert scaler.scale == 200.0
    for expected in (100.0, 70.0):
        scaler.update(True)
        assert scaler.scale == expected


def test_overflow_at_the_minimum_says_what_to_do() -> None:
    scaler = DynamicGradScaler(8.0, min_scale=4.0, growth_interval=10, hysteresis=1)
    scaler.update(True)
    assert scaler.scale == 4.0
    with pytest.raises(LossScaleError, match=r"minimum --min-loss-scale 4 and the gradient still overflows.*--bf16"):
        scaler.update(True)


def test_scale_stays_finite_in_float32() -> None:
    scaler = DynamicGradScaler(2.0**126, min_scale=1.0, growth_interval=1, hysteresis=1)
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale == 2.0**127
    assert torch.isfinite(torch.tensor(scaler.scale, dtype=torch.float32))


def test_settings_of_the_command_line_win_over_the_checkpoint() -> None:
    scaler = DynamicGradScaler(2.0**16, min_scale=16.0, growth_interval=2, hysteresis=1)
    scaler.load_state_dict({"kind": "dynamic", "scale": 2.0, "clean_steps": 7, "hysteresis_left": 5})
    assert scaler.scale == 16.0
    scaler.update(False)  # the stored count is already past the new interval
    assert scaler.scale == 32.0
    scaler.update(True)  # one overflow is enough now
    assert scaler.scale == 16.0


def test_dynamic_scale_after_a_constant_one_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scaler = DynamicGradScaler(2.0**16, min_scale=1.0)
    with caplog.at_level(logging.WARNING):
        scaler.load_state_dict(GradScaler(1.0).state_dict())
    assert scaler.scale == 2.0**16
    assert "--initial-loss-scale 65536" in caplog.text


def test_constant_scale_never_changes() -> None:
    scaler = GradScaler(128.0)
    for overflow in (True, False, True):
        scaler.update(overflow)
    scaler.load_state_dict({"kind": "constant", "scale": 1.0})
    assert scaler.scale == 128.0


def test_the_settings_choose_the_scaler() -> None:
    for precision in (PrecisionConfig(), PrecisionConfig(bf16=True), PrecisionConfig(fp64=True)):
        scaler = make_grad_scaler(precision)
        assert type(scaler) is GradScaler and scaler.scale == 1.0
    constant = make_grad_scaler(PrecisionConfig(fp16=True, loss_scale=256.0))
    assert type(constant) is GradScaler and constant.scale == 256.0
    dynamic = make_grad_scaler(
        PrecisionConfig(fp16=True, initial_loss_scale=64.0, min_loss_scale=2.0, loss_scale_window=5, hysteresis=3)
    )
    assert isinstance(dynamic, DynamicGradScaler)
    assert (dynamic.scale, dynamic.min_scale, dynamic.growth_interval, dynamic.hysteresis) == (64.0, 2.0, 5, 3)
