"""Which layout is nearest for the places that are left, and what ranks are told of it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron_lab.resilience.layouts import (
    Layout,
    check_memory,
    find_nearest_layout,
    format_extra_flags,
    format_layout_messages,
    get_global_batch_size,
    parse_with_batch_size,
)
from megatron_lab.resilience.ranks import build_environment, select_visible_devices
from tests.support.runs import arguments

TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True, "expert_model_parallel_size": 4}


def fits(config: Config, world_size: int, per_node: int) -> str | None:
    """Any memory will do."""
    return None


def found(settings: dict[str, Any], places: dict[str, int], most: int = 8) -> Layout | None:
    """The nearest layout of the tiny model."""
    return find_nearest_layout(parse_with_batch_size(arguments(train_iters=1, **settings), 8), places, most, fits)


@pytest.mark.parametrize(
    ("settings", "left", "world", "changed"),
    [
        ({}, 4, 4, ""),
        ({}, 3, 2, ""),  # a global batch of 8 in microbatches of 2 is 4 for each of 1, 2 or 4 ranks
        ({"global_batch_size": 12}, 5, 3, ""),
        ({"global_batch_size": None}, 3, 2, ""),
        (TP, 7, 4, ""),
        ({**TP, **PP}, 7, 4, ""),
        ({**TP, **PP}, 3, 2, "--tensor-model-parallel-size 1"),
        ({**TP, **PP}, 1, 1, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"),
        ({"context_parallel_size": 2}, 1, 1, "--context-parallel-size 1"),
        (EXPERTS, 3, 2, "--expert-model-parallel-size 2"),
        (EXPERTS, 4, 4, ""),
    ],
)
def test_the_nearest_layout(settings: dict[str, Any], left: int, world: int, changed: str) -> None:
    """Fewer data ranks first, smaller sizes only where nothing else is left; and the command line that follows is accepted."""
    layout = found(settings, {"a": left})
    assert layout is not None and (layout.world_size, str(layout.change)) == (world, changed)
    argv = arguments(train_iters=1, **settings)
    added = format_extra_flags(layout, argv, 8)
    config = load([*argv, *added], world).config
    assert get_global_batch_size(config, world) == (settings.get("global_batch_size") or 8)
    assert ("--global-batch-size" in added) == ("global_batch_size" in settings and settings["global_batch_size"] is None)


def test_nothing_fits() -> None:
    assert find_nearest_layout(parse_with_batch_size(arguments(train_iters=1), 8), {"a": 4}, 8, lambda *_: "too large") is None


def test_what_does_not_fit_the_memory_is_passed_over() -> None:
    layout = find_nearest_layout(
        parse_with_batch_size(arguments(train_iters=1), 8), {"a": 4}, 8, lambda _, world, __: "too large" if world > 2 else None
    )
    assert layout is not None and layout.world_size == 2
    assert layout.messages == ("4 ranks would not fit: too large",)


@pytest.mark.parametrize(("memory_gb", "enough"), [(1e-6, False), (10.0, True)])
def test_the_planner_knows_the_memory(memory_gb: float, enough: bool) -> None:
    config = parse_with_batch_size(arguments(train_iters=1, device_memory_gb=memory_gb, device="cuda"), 8)
    assert (check_memory(config, 4, 4) is None) == enough


def test_tensor_groups_stay_on_a_node() -> None:
    layout = found(TP, {"a": 3, "b": 4, "c": 1})
    assert layout is not None and dict(layout.ranks_per_node) == {"a": 2, "b": 2, "c": 0}
    layout = found(TP, {"a": 3, "b": 4})
    assert layout is not None and dict(layout.ranks_per_node) == {"a": 2, "b": 2}


def test_more_places_than_ranks() -> None:
    layout = found({}, {"a": 4, "b": 4}, most=4)
    assert layout is not None and dict(layout.ranks_per_node) == {"a": 4, "b": 0}


def test_the_log_says_what_changed() -> None:
    config = parse_with_batch_size(arguments(train_iters=1, **TP), 8)
    layout = find_nearest_layout(config, {"a": 3}, 8, fits)
    assert layout is not None
    assert format_layout_messages(layout, config, 4) == [
        "2 ranks instead of 4: 1 data rank with 4 microbatches of the unchanged global batch of 8 samples"
    ]
    assert format_layout_messages(layout, config, 2) == []


def test_variables_of_a_rank() -> None:
    """As torchrun sets them, with nodes of different sizes."""
    told = build_environment(1, [2, 3], 1, "host", 29, (4, 5), "job")
    assert {name: told[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
    }
    assert told["TORCHELASTIC_RUN_ID"] == "job" and told["TORCHELASTIC_RESTART_COUNT"] == "4"


def test_devices_of_places() -> None:
    assert select_visible_devices([0, 1], 4, None) is None
    assert select_visible_devices([0, 2, 3], 4, None) == "0,2,3"
    assert select_visible_devices([1, 2], 3, "4,5,GPU-x") == "5,GPU-x"
    assert select_visible_devices([1, 2], 3, "") is None, "a node without devices"
