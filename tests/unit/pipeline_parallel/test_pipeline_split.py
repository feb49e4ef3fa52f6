"""The layer table that the settings ask for, and the advice on it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.pipeline_parallel.partition import (
    Chunk,
    build_layer_table,
    compute_imbalance,
    partition_layers,
    suggest_balanced_split,
)
from megatron.spec.operations import assign_chunks_round_robin, assign_chunks_v_shape

VOCABULARY = 50257
GPT = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=1024)
"""Its output layer costs as much as 3.8 layers."""


def lengths(table: list[Chunk]) -> list[int]:
    return [len(chunk.layers) for chunk in table]


def settings(stages: int, **changes: Any) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=stages, **changes)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (settings(1), [24]),
        (settings(4), [6, 6, 6, 6]),
        (settings(4, pipeline_schedule="gpipe"), [6, 6, 6, 6]),
        (settings(5, pipeline_schedule="zb-h1"), [5, 5, 5, 5, 4]),
        (settings(4, num_layers_per_virtual_pipeline_stage=3), [3] * 8),
        (settings(4, num_virtual_stages_per_pipeline_rank=3), [2] * 12),
        (settings(4, pipeline_schedule="zb-v"), [3] * 8),
        (settings(4, account_for_loss_in_pipeline_split=True), [6, 7, 6, 5]),
        (settings(13, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True), [1, *[2] * 11, 1]),
        (settings(4, decoder_first_pipeline_num_layers=3), [3, 7, 7, 7]),
        (settings(4, decoder_first_pipeline_num_layers=8, decoder_last_pipeline_num_layers=4), [8, 6, 6, 4]),
        (settings(4, decoder_last_pipeline_num_layers=4, pipeline_schedule="zb-v"), [3, 4, 4, 2, 2, 3, 3, 3]),
        (settings(4, pipeline_model_parallel_layout="Et*9|(t*5|)*2,t*5,L"), [9, 5, 5, 5]),
        (settings(2, pipeline_model_parallel_layout="Et*9|t*15||L"), [9, 15, 0, 0]),
        (settings(4, pipeline_split="balanced"), [7, 7, 7, 3]),
        (settings(4, pipeline_split="balanced", num_virtual_stages_per_pipeline_rank=2), [3, 4, 4, 3, 4, 3, 3, 0]),
        (settings(4, pipeline_split="balanced", pipeline_schedule="zb-v"), [3, 4, 4, 4, 3, 3, 3, 0]),
    ],
)
def test_tables_of_settings(parallel: ParallelConfig, expected: list[int]) -> None:
    table = build_layer_table(GPT, parallel, VOCABULARY)
    assert lengths(table) == expected
    assert sum(expected) == 24
    in_a_v = parallel.schedule == "zb-v"
    stages = parallel.pipeline_model_parallel_size
    assert tuple(chunk.stage for chunk in table) == (
        assign_chunks_v_shape(stages) if in_a_v else assign_chunks_round_robin(stages, len(table) // stages)
    )


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        (24, settings(25), "24 layers cannot fill 25 pipeline stages: each stage needs at least one layer"),
        (3, settings(2, num_virtual_stages_per_pipeline_rank=2), "3 layers cannot fill 2 pipeline stages with 2 chunks each"),
        (
            24,
            settings(4, num_layers_per_virtual_pipeline_stage=5),
            "24 layers do not divide evenly among 4 pipeline stages, in chunks of 5",
        ),
        (24, settings(4, pipeline_model_parallel_layout="Et*9|(t*5|)*2,t*4,L"), "it has 23 layers (t), but the model has 24"),
        (
            24,
            settings(4, pipeline_model_parallel_layout="Et*9|t*15|L"),
            "3 chunks of the layout do not divide evenly among 4 pipeline stages",
        ),
        (24, settings(2, pipeline_model_parallel_layout="Et*24|L|"), "L is at character 7, but the loss must be last"),
        (
            24,
            settings(4, pipeline_schedule="1f1b", pipeline_model_parallel_layout="Et*3|(t*3|)*6t*3L"),
            "1f1b requires 1 chunk per stage, not 2",
        ),
    ],
)
def test_settings_without_a_table_are_refused(layers: int, parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_layer_table(dataclasses.replace(GPT, num_layers=layers), parallel, VOCABULARY)


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (80, settings(16, num_virtual_stages_per_pipeline_rank=2)),
        (80, settings(16)),
        (30, settings(4)),
        (30, settings(4, pipeline_schedule="zb-v")),
        (30, settings(4, pipeline_split="balanced")),
        (30, settings(4, num_virtual_stages_per_pipeline_rank=4)),
    ],
)
def test_reported_losses_of_layers(layers: int, parallel: ParallelConfig) -> None:
    """80 layers on 16 stages of 2 chunks once trained 64, and 30 layers on 4 stages 28."""
    table = build_layer_table(dataclasses.replace(GPT, num_layers=layers), parallel, VOCABULARY)
    assert [layer for chunk in table for layer in chunk.layers] == list(range(layers))


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    """The output layer's products against a layer's: 2 h v / (24 h^2 + 2 h s)."""
    for vocabulary, expected in ((8, [6, 6, 6, 6]), (VOCABULARY, [7, 7, 7, 3]), (200_000, [8, 8, 8, 0])):
        assert lengths(build_layer_table(GPT, settings(4, pipeline_split="balanced"), vocabulary)) == expected


# ---- what is said about them


def test_imbalance_is_the_slowest_stage_over_the_mean() -> None:
    table = partition_layers(12, assign_chunks_round_robin(4))
    assert compute_imbalance(table, [1] * 12, 0, 0) == 1
    assert compute_imbalance(table, [2] * 12, 0, 8) == pytest.approx(14 / 8)  # 6, 6, 6, 14
    assert compute_imbalance(table, [0] * 12, 5, 0) == 4
    assert (
        compute_imbalance(partition_layers(8, assign_chunks_v_shape(2)), [1, 1, 2, 2, 2, 2, 1, 1], 1, 3) == 1
    )  # 1+1+1+1 and 1+3; 2+2+2+2


def test_advice_says_what_a_balanced_split_would_gain() -> None:
    """On four stages the last has 6 layers and the loss, 9.77 of 27.77 units; balanced, the slowest has 7."""
    assert suggest_balanced_split(GPT, settings(4), VOCABULARY) == (
        "stage 3 is the slowest, with 1.41 times the mean work (the loss costs as much as 3.8 layers): "
        "--pipeline-split balanced would shorten it by 28 %"
    )
    in_a_v = suggest_balanced_split(GPT, settings(4, pipeline_schedule="zb-v"), VOCABULARY)
    assert in_a_v is not None and in_a_v.startswith("stage 0 is the slowest, with 1.41 times")


@pytest.mark.parametrize(
    ("parallel", "asking"),
    [
        (
            settings(4, account_for_loss_in_pipeline_split=True),
            "--pipeline-split balanced in place of --account-for-loss-in-pipeline-split",
        ),
        (
            settings(4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
            "--pipeline-split balanced in place of "
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split",
        ),
        (
            settings(4, num_layers_per_virtual_pipeline_stage=3),
            "--pipeline-split balanced --num-virtual-stages-per-pipeline-rank 2 "
            "in place of --num-layers-per-virtual-pipeline-stage",
        ),
    ],
)
def test_advice_can_be_followed(parallel: ParallelConfig, asking: str) -> None:
    """Flags that a balanced split excludes are named, and the number of chunks stays."""
    line = suggest_balanced_split(GPT, parallel, VOCABULARY)
    assert line is not None and f": {asking} would shorten it by" in line


@pytest.mark.parametrize(
    ("parallel", "vocabulary"),
    [
        (settings(4), 1000),
        (settings(1), VOCABULARY),
        (settings(4, pipeline_split="balanced"), VOCABULARY),
        (settings(4, decoder_first_pipeline_num_layers=6), VOCABULARY),
        (settings(4, decoder_last_pipeline_num_layers=6), VOCABULARY),
        (settings(4, pipeline_model_parallel_layout="Et*6|(t*6|)*2,t*6,L"), VOCABULARY),
        (settings(26, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True), VOCABULARY),
    ],
)
def test_no_advice_without_gain_or_where_sizes_are_given(parallel: ParallelConfig, vocabulary: int) -> None:
    assert suggest_balanced_split(GPT, parallel, vocabulary) is None
