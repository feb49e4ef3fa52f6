"""What attention's kernel copies and measures, as a plan and a start tell it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.attention import documents
from megatron.attention.documents import count_bytes_copied_for_groups
from megatron.spec.operations import OpType
from megatron_lab.planner.attention_notes import count_copied_bytes, format_kernel_notes
from tests.support.activation_runs import plan_rank, settings

GROUPED: dict[str, Any] = {"bf16": True, "group_query_attention": True, "num_query_groups": 2, "num_attention_heads": 8}
PACKED: dict[str, Any] = {"reset_attention_mask": True}
VARLEN = documents._load_varlen_attn()


def with_torch(monkeypatch: pytest.MonkeyPatch, *, takes_groups: bool) -> None:
    """Let torch's attention for documents take grouped heads, as from 2.13 on, or not. A plan computes nothing, so 2.11 can."""
    attend, knows_groups = VARLEN

    def attend_in_groups(*args: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        return attend(*args, **settings, **({"enable_gqa": enable_gqa} if knows_groups else {}))

    monkeypatch.setattr(documents, "_load_varlen_attn", lambda: (attend_in_groups, takes_groups))


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({**GROUPED, **PACKED}, 4),
        ({**GROUPED, "window_size": "100,0"}, 4),
        ({**GROUPED, "window_size": "100,0", "window_attn_skip_freq": 2}, 2),
        ({**GROUPED, **PACKED, "context_parallel_size": 2, "cp_comm_type": ("a2a",)}, 4),
        (GROUPED, 0),
        ({**GROUPED, **PACKED, "bf16": False}, 0),
        ({**GROUPED, **PACKED, "attention_dropout": 0.1}, 0),
        ({**GROUPED, **PACKED, "attention_backend": "math"}, 0),
        ({**GROUPED, **PACKED, "num_query_groups": 8}, 0),
        ({**GROUPED, **PACKED, "context_parallel_size": 2}, 0),
        ({**GROUPED, "window_size": "100,0", "softmax_type": "learnable"}, 0),
    ],
)
def test_layers_that_copy_keys_and_values(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], num_layers: int) -> None:
    config = settings(2, **changes)
    with_torch(monkeypatch, takes_groups=False)
    copied, layers = count_copied_bytes(config, on_cuda=True)
    heads = 8 // config.parallel.context_parallel_size
    assert (copied, layers) == (2 * 256 * 4 * heads * 8 * 2 if num_layers else 0, num_layers)
    assert count_copied_bytes(config, on_cuda=False) == (0, 0)
    with_torch(monkeypatch, takes_groups=True)
    assert count_copied_bytes(config, on_cuda=True) == (0, 0)


@pytest.mark.parametrize(("micro_batch_size", "share"), [(1, 0.25), (4, 0.75)])
def test_a_plan_keeps_as_much_more_as_it_says(monkeypatch: pytest.MonkeyPatch, micro_batch_size: int, share: float) -> None:
    """To the byte: keys and values of 8 heads in place of what is kept without the copy. Of one sample that is the projection's
    output, of 8 + 2 + 2 heads; of several samples, which are put one after the other, keys and values of 2 heads each."""
    config, kept = settings(1, **GROUPED, **PACKED, micro_batch_size=micro_batch_size), []
    for takes_groups in (True, False):
        with_torch(monkeypatch, takes_groups=takes_groups)
        kept.append(plan_rank(config, 1, device_type="cuda").traces[0].ops[OpType.FORWARD].net_bytes)
    copied, num_layers = count_copied_bytes(config, on_cuda=True)
    assert kept[1] - kept[0] == num_layers * copied * share > 0
    assert count_bytes_copied_for_groups(256 * micro_batch_size, 8, 8, 2) == copied


def test_a_plan_says_what_a_run_measures_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch, takes_groups=False)
    (line,) = format_kernel_notes(settings(1, bf16=True), on_cuda=True)
    assert "first times flash and cudnn attention" in line
    (line,) = format_kernel_notes(settings(1, **GROUPED, **PACKED), on_cuda=True)
    assert "4 layers copy keys and values" in line and "262 kB a layer and microbatch" in line
    for changes in ({"bf16": True, "attention_backend": "flash"}, {"bf16": True, "deterministic_mode": True}, {}):
        assert not list(format_kernel_notes(settings(1, **changes), on_cuda=True))
    assert not list(format_kernel_notes(settings(1, bf16=True), on_cuda=False))
