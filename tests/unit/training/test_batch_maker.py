"""The inputs of a step on each rank: what the model gets of a microbatch, and who gets which samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.samples import DocumentRules, Microbatch, read_microbatch
from megatron.model.inputs import ModelInputs
from megatron.parallel.topology import Topology
from megatron.training.inputs import BatchBuilder, HostInputs, SequenceSplitter
from tests.support.lone_rank import lone_rank
from tests.support.windows import Windows

EOD, SEQ, GLOBAL = 0, 4, 12
ROWS = np.arange(48 * (SEQ + 1)).reshape(48, SEQ + 1) % 7
"""An end of document at every seventh token."""
ALL_RULES = DocumentRules(EOD, True, True, True)


def steps(
    maker: BatchBuilder, source: Windows | None = None, consumed: int = 0, num_workers: int = 0
) -> Iterator[list[ModelInputs]]:
    """Training steps of 12 samples."""
    return maker.iter_batches(
        source, global_batch_size_at=lambda _: GLOBAL, consumed_samples=consumed, total_samples=48, num_workers=num_workers
    )


def test_without_resets_positions_run_through_and_nothing_bounds_attention() -> None:
    maker = BatchBuilder(lone_rank(), 1, SEQ, 3, DocumentRules(EOD, eod_mask_loss=True))
    first, second, *_ = next(steps(maker, Windows(ROWS)))
    assert first.tokens is not None and first.labels is not None and first.loss_mask is not None
    assert first.tokens.tolist() == ROWS[:3, :-1].T.tolist()
    assert first.labels.tolist() == ROWS[:3, 1:].T.tolist()
    assert torch.equal(first.loss_mask, (first.tokens != EOD).float())
    assert all(tensor.is_contiguous() for tensor in (first.tokens, first.labels, first.loss_mask))
    assert first.positions.tolist() == [[i] * 3 for i in range(SEQ)]
    assert first.positions is second.positions, "nothing is made for each microbatch"
    assert first.documents is None


def test_resets_bring_positions_and_bounds_of_each_microbatch() -> None:
    maker = BatchBuilder(lone_rank(), 1, SEQ, 3, ALL_RULES)
    for inputs, first in zip(next(steps(maker, Windows(ROWS))), range(0, GLOBAL, 3), strict=True):
        expected = read_microbatch(Windows(ROWS), first, 3, ALL_RULES)
        assert expected.positions is not None and expected.cu_seqlens is not None and inputs.documents is not None
        assert inputs.positions.tolist() == expected.positions.T.tolist()
        assert inputs.documents.cu_seqlens.tolist() == inputs.documents.cu_seqlens_device.tolist() == expected.cu_seqlens.tolist()
        assert inputs.documents.cu_seqlens_device.dtype == torch.int32
        assert inputs.documents.max_seqlen == np.diff(expected.cu_seqlens).max()


def test_a_rank_without_samples_cannot_know_documents() -> None:
    with pytest.raises(AssertionError, match="where documents end"):
        next(steps(BatchBuilder(lone_rank(Topology(pp=3), 1), 1, SEQ, 3, ALL_RULES)))


@settings(max_examples=40)
@given(
    sizes=st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 3), (1, 3, 2), (2, 2, 2), (1, 1, 6)]),
    micro=st.sampled_from([1, 2]),
    num_workers=st.sampled_from([0, 1, 4]),
    step=st.integers(0, 3),
    rules=st.sampled_from([DocumentRules(EOD), ALL_RULES]),
)
def test_every_world_reads_the_same_samples(
    sizes: tuple[int, int, int], micro: int, num_workers: int, step: int, rules: DocumentRules
) -> None:
    """Whatever the layout, the workers and where the run resumes; and all ranks of a pipeline have the same."""
    tp, pp, dp = sizes
    by_data_rank: dict[int, list[list[list[int]]]] = {}
    for rank in range(tp * pp * dp):
        context = lone_rank(Topology(tp=tp, pp=pp, dp=dp), rank)
        batches = list(steps(BatchBuilder(context, 1, SEQ, micro, rules), Windows(ROWS), step * GLOBAL, num_workers))
        read = [[inputs.tokens.t().tolist() for inputs in batch] for batch in batches if batch]  # type: ignore[union-attr]
        mine = context.data_group.rank
        assert by_data_rank.setdefault(mine, read) == read
    for number in range(4 - step):
        together = [
            row
            for microbatches in zip(*(by_data_rank[d][number] for d in range(dp)), strict=True)
            for m in microbatches
            for row in m
        ]
        start = (step + number) * GLOBAL
        assert together == ROWS[start : start + GLOBAL, :-1].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_for_cuda_the_thread_that_reads_pins(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    """Five tensors, contiguous before they are pinned, so that one copy each brings them to the device."""
    pinned: list[tuple[str, bool]] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.append((threading.current_thread().name, self.is_contiguous()))
        return self

    def for_cuda(microbatch: Microbatch, device: torch.device, splitter: SequenceSplitter) -> HostInputs:
        return make(microbatch, torch.device("cuda"), splitter)

    make = HostInputs.of
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(HostInputs, "of", for_cuda)
    maker: Any = BatchBuilder(lone_rank(), 1, SEQ, 6, ALL_RULES)
    batches = steps(maker, Windows(ROWS[:12].repeat(4, axis=0)), num_workers=num_workers)
    assert len(next(batches)) == 2
    batches.close()  # type: ignore[attr-defined]
    assert len(pinned) >= 10 and all(contiguous for _, contiguous in pinned)
    here = threading.current_thread().name
    assert {name for name, _ in pinned} <= ({"loader_0", "loader_1"} if num_workers else {here})


def test_evaluation_reads_the_same_first_samples_each_time_without_dropout() -> None:
    maker = BatchBuilder(lone_rank(), 1, SEQ, 3, DocumentRules(EOD))
    runs = [
        list(maker.iter_evaluation_batches(Windows(ROWS), global_batch_size=6, num_batches=2, num_workers=workers))
        for workers in (0, 0, 3)
    ]
    read = [[inputs.tokens.t().tolist() for batch in run for inputs in batch] for run in runs]  # type: ignore[union-attr]
    assert read[0] == read[1] == read[2] == [ROWS[first : first + 3, :-1].tolist() for first in range(0, 12, 3)]
    assert all(inputs.dropout_key is None for run in runs for batch in run for inputs in batch)
