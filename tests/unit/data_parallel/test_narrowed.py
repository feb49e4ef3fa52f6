"""Reductions of gradients in fewer bits: which gradients travel so; and on CUDA, where several streams may wait for the result,
which one of them takes in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import LowPrecisionReduction, select_reduce_dtype
from megatron.data_parallel.bucket_plan import plan_buckets
from megatron.parallel.topology import Topology
from tests.support.bucket_examples import build
from tests.support.lone_rank import lone_rank


@pytest.mark.parametrize("adds", [False, True])
def test_a_second_stream_waits_until_the_first_has_taken_the_result_in(monkeypatch: pytest.MonkeyPatch, *, adds: bool) -> None:
    """An event is recorded after the result is written, and every later wait is for that event."""
    events: list[object] = []

    def record_event() -> str:
        events.append("recorded")
        return "event"

    stream = SimpleNamespace(record_event=record_event, wait_event=lambda event: events.append(f"waits for {event}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    into: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        add_=lambda _: events.append("added"),
        copy_=lambda _: events.append("copied"),
    )
    reduction: Any = SimpleNamespace(wait=lambda: torch.zeros(1))
    narrowed = LowPrecisionReduction(reduction, into, accumulates=adds)
    assert narrowed.wait() is into
    assert events == ["added" if adds else "copied", "recorded"]
    assert narrowed.wait() is into and events[2:] == ["waits for event"]


@pytest.mark.parametrize(
    ("topology", "dtype", "in_bf16", "narrow"),
    [
        (Topology(tp=2, dp=2), torch.bfloat16, True, True),
        (Topology(tp=2), torch.bfloat16, True, False),
        (Topology(tp=2, dp=2), torch.float32, True, False),
        (Topology(tp=2, dp=2), torch.bfloat16, False, False),
    ],
)
def test_gradients_travel_in_bfloat16_where_data_ranks_add_them(
    topology: Topology, dtype: torch.dtype, *, in_bf16: bool, narrow: bool
) -> None:
    """Sums over tensor ranks alone, as those of norms under sequence parallelism, stay in float32."""
    context = lone_rank(topology)
    model = build(context, dtype=dtype, sequence_parallel=True, materialized=False)
    plans = plan_buckets(model.params, context, bucket_size=None)
    assert {"tp" in plan.axes for plan in plans} == {True, False}
    expected = {torch.bfloat16} if narrow else {None}
    assert {select_reduce_dtype(plan, context, in_bf16=in_bf16) for plan in plans} == expected
