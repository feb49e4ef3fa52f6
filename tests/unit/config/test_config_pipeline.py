"""The rules about schedule, virtual stages and the split of layers: what they report, and what they let through."""

from __future__ import annotations

import itertools

import pytest

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from tests.support.rule_cases import PIPELINE_RULES, Case, argv, check_case, check_rules_have_cases, config_of, every, reported

PP = "--pipeline-model-parallel-size"
EACH = "--num-layers-per-virtual-pipeline-stage"
COUNT = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"

CASES: list[Case] = [
    # virtual stages of so many layers
    (
        f"--num-layers 10 {PP} 2 {EACH} 2",
        2,
        {EACH, "--num-layers", PP},
        [f"--num-layers 10 is not divisible by {PP} 2 x {EACH} 2 = 4", f"{COUNT} supports any number of layers"],
        [f"{EACH} 1", f"{EACH} None {COUNT} 2", f"{EACH} None {COUNT} 3", "--num-layers 8", "--num-layers 12"],
    ),
    (
        f"--num-layers 10 {PP} 2 {EACH} 2 {EMBEDDING} {LOSS} {COUNT} 5",
        2,
        {EACH, COUNT},
        ["contradict each other", "--num-layers 10 + embedding + loss = 12 over 2 pipeline ranks", "makes 3 on each rank"],
        [f"{EACH} None", f"{COUNT} None"],
    ),
    (f"--num-layers 9 {PP} 2 {EACH} 5 {LOSS}", 2, {EACH}, ["does not support 1 virtual stage", "+ loss = 10"], [f"{EACH} 1"]),
    # schedules and the virtual stages that they have
    (
        f"{PP} 2 --pipeline-schedule interleaved",
        2,
        {"--pipeline-schedule", COUNT},
        ["--pipeline-schedule interleaved does not support 1 virtual stage on each pipeline rank.", "two or more"],
        ["--pipeline-schedule 1f1b", f"{COUNT} 2"],
    ),
    (
        f"--num-layers 8 {PP} 2 {EACH} 4",
        2,
        {"--pipeline-schedule", EACH},
        ["The default schedule interleaved does not support 1 virtual stage", f"--num-layers 8 over 2 ranks, {EACH} 4"],
        ["--pipeline-schedule 1f1b", f"{EACH} 2", f"{EACH} None"],
    ),
    *(
        (
            f"--num-layers 8 {PP} 2 {COUNT} 2 --pipeline-schedule {name}",
            2,
            {"--pipeline-schedule", COUNT},
            [f"--pipeline-schedule {name} does not support 2 virtual stages", "It has one virtual stage"],
            ["--pipeline-schedule interleaved", "--pipeline-schedule zb-v", f"{COUNT} None"],
        )
        for name in ("1f1b", "gpipe", "zb-h1")
    ),
    (
        f"--num-layers 12 {PP} 2 {EACH} 2 --pipeline-schedule zb-v",
        2,
        {"--pipeline-schedule", EACH},
        ["zb-v does not support 3 virtual stages", "in a V"],
        ["--pipeline-schedule interleaved", f"{EACH} 3", f"{EACH} None", f"{EACH} None {COUNT} 2"],
    ),
    (
        f"--num-layers 4 {PP} 2 {LAYOUT} 'Ett|ttm*2L' --mtp-num-layers 1",
        2,
        {LAYOUT, "--mtp-num-layers"},
        ["has 2 depths (m), but --mtp-num-layers is 1"],
        ["--mtp-num-layers 2", f"{LAYOUT} 'Ett|ttL'"],
    ),
    (
        f"{PP} 2 --pipeline-schedule zb-v {LAYOUT} 'Ett|ttL'",
        2,
        {"--pipeline-schedule", LAYOUT},
        ["zb-v does not support 1 virtual stage", f"from the chunks of {LAYOUT}"],
        ["--pipeline-schedule 1f1b", "--pipeline-schedule gpipe"],
    ),
    # layers for all
    (
        f"{PP} 8",
        8,
        {"--num-layers", PP},
        [f"{PP} 8 is more than --num-layers 4", "Each pipeline stage"],
        [f"{PP} 4", "--num-layers 8"],
    ),
    (
        f"--num-layers 3 {PP} 2 {COUNT} 2",
        2,
        {"--num-layers", PP, COUNT},
        [f"{PP} 2 x 2 virtual stages = 4 chunks is more than --num-layers 3.", "Each chunk holds at least one layer"],
        [f"{PP} 1", "--num-layers 4", f"{COUNT} None", f"{COUNT} None {LAYOUT} 'Et|t|t|L'"],
    ),
    (
        f"--num-layers 2 {PP} 2 --pipeline-schedule zb-v {EMBEDDING}",
        2,
        {"--num-layers", PP},
        ["4 chunks is more than --num-layers 2 + embedding = 3"],
        ["--num-layers 3", f"--no-{EMBEDDING[2:]} {LAYOUT} 'E|t|t|L'"],
    ),
    (f"--num-layers 2 {PP} 4 --pipeline-split balanced", 4, {PP}, [f"{PP} 4 is more than --num-layers 2"], ["--num-layers 3"]),
    (f"--num-layers 100 {PP} 32 {COUNT} 4", 32, {COUNT}, ["128 chunks"], [f"{PP} 16", f"{COUNT} 3", "--num-layers 128"]),
    # layers at the ends
    (f"{FIRST} -3 {PP} 2", 2, {FIRST}, ["out of range", "at least 1"], [f"{FIRST} 1"]),
    (f"{FIRST} 3", 1, {FIRST, PP}, [f"With {FIRST} 3 there must be several pipeline ranks"], [f"{FIRST} None"]),
    (f"{FIRST} 3", 2, {FIRST, PP}, ["there must be several pipeline ranks"], [f"{PP} 2"]),
    (
        f"--num-layers 24 {PP} 3 {COUNT} 4 {LAST} 6",
        3,
        {LAST, COUNT},
        [f"{LAST} 6 is not divisible by the 4 virtual stages of that rank", "the same number of layers"],
        [f"{LAST} 4", f"{LAST} 8", f"{COUNT} 3", f"{COUNT} 2", f"{LAST} None"],
    ),
    (
        f"--num-layers 8 {PP} 4 {FIRST} 4 {LAST} 3",
        4,
        {FIRST, LAST, "--num-layers"},
        [f"With {FIRST} 4 and {LAST} 3, 1 of --num-layers 8 remain for the 2 other pipeline ranks."],
        [f"{FIRST} 3", f"{LAST} 2", "--num-layers 9", f"{FIRST} None", f"{LAST} None"],
    ),
    (
        f"--num-layers 8 {PP} 4 {FIRST} 9",
        4,
        {FIRST},
        [f"With {FIRST} 9, 0 of --num-layers 8 remain"],
        [f"{FIRST} 5", "--num-layers 12"],
    ),
    (
        f"--num-layers 8 {PP} 2 {FIRST} 3 {LAST} 3",
        2,
        {FIRST, LAST},
        ["assign 6 layers, but --num-layers is 8", "no other"],
        [f"{FIRST} 5", f"{LAST} 5", "--num-layers 6", f"{FIRST} None"],
    ),
    (
        f"--num-layers 20 {PP} 3 {COUNT} 4 {FIRST} 16",
        3,
        {FIRST, COUNT},
        ["4 of --num-layers 20 remain for the 2 other pipeline ranks with 4 virtual stages each"],
        [f"{FIRST} 12", "--num-layers 24", f"{COUNT} 2"],
    ),
    # ways of splitting that exclude each other
    (
        f"{PP} 2 {LAYOUT} 'Ett|ttL' --pipeline-split balanced {COUNT} 1 {LOSS}",
        2,
        {LAYOUT, "--pipeline-split", COUNT, LOSS},
        [f"{LAYOUT} 'Ett|ttL' and --pipeline-split balanced, {COUNT} 1, {LOSS} exclude each other"],
        [f"{LAYOUT} None", f"--pipeline-split even {COUNT} None --no-{LOSS[2:]}"],
    ),
    (
        f"{PP} 2 --pipeline-split balanced {EMBEDDING}",
        2,
        {"--pipeline-split", EMBEDDING},
        ["exclude each other", "by cost"],
        [f"--no-{EMBEDDING[2:]}", "--pipeline-split even"],
    ),
    (
        f"{PP} 2 --pipeline-split balanced --layer-costs no/such/file",
        2,
        {"--layer-costs"},
        ["--layer-costs no/such/file cannot be read: No such file", "--profile-pipeline writes this file"],
        ["--layer-costs None"],
    ),
    (f"{PP} 2 --pipeline-split balanced {FIRST} 1", 2, {"--pipeline-split", FIRST}, ["exclude"], [f"{FIRST} None"]),
    (f"{PP} 2 --pipeline-split balanced {EACH} 1", 2, {"--pipeline-split", EACH}, ["exclude"], [f"{EACH} None"]),
    (f"--num-layers 8 {PP} 2 {EACH} 2 {LAST} 4", 2, {EACH, LAST}, ["exclude each other", f"use {COUNT}"], [f"{LAST} None"]),
    (f"{PP} 2 {LOSS} {FIRST} 2", 2, {LOSS, FIRST}, ["exclude each other"], [f"{FIRST} None", f"--no-{LOSS[2:]}"]),
    # layouts
    (
        f"{PP} 2 {LAYOUT} 'Ett|(ttL'",
        2,
        {LAYOUT},
        [f"{LAYOUT} 'Ett|(ttL' cannot be used.", "The bracket at character 5 of the pipeline layout is not closed."],
        [f"{LAYOUT} None"],
    ),
    (
        f"{PP} 2 {LAYOUT} 'tt|ELtt'",
        2,
        {LAYOUT},
        ["cannot be used", "E is at character 4", "L is at character 5"],
        [f"{LAYOUT} 'Ett|ttL'"],
    ),
    (
        f"--num-layers 8 {PP} 2 {LAYOUT} 'Et*3|t|t|L'",
        2,
        {LAYOUT, "--num-layers"},
        ["has 5 layers (t), but --num-layers is 8.", "Layers 5 to 7 are missing."],
        [f"{LAYOUT} 'Ettt|tt|tt|tL'", "--num-layers 5"],
    ),
    (f"{PP} 2 {LAYOUT} 'Et|ttL'", 2, {LAYOUT}, ["has 3 layers", "Layer 3 is missing."], [f"{LAYOUT} 'Ett|ttL'"]),
    (
        f"{PP} 2 {LAYOUT} 'Et*3|t*4L'",
        2,
        {LAYOUT, "--num-layers"},
        ["has 7 layers (t), but --num-layers is 4.", "The model has no layers 4 to 6."],
        [f"{LAYOUT} 'Ett|ttL'", "--num-layers 7"],
    ),
    (f"{PP} 2 {LAYOUT} 'E|L'", 2, {LAYOUT, "--num-layers"}, ["has 0 layers (t)"], [f"{LAYOUT} 'Ett|ttL'"]),
    (
        f"--num-layers 8 {PP} 2 {LAYOUT} 'Et*4|t|tttL'",
        2,
        {LAYOUT, PP},
        [f"has 3 chunks, which do not divide among {PP} 2."],
        [f"{LAYOUT} 'Et*4|t*4L'", f"{PP} 1"],
    ),
    (f"--num-layers 8 {PP} 4 {LAYOUT} 'Et|t*6|tL'", 4, {LAYOUT, PP}, ["has 3 chunks"], [f"{LAYOUT} 'Et|ttt|ttt|tL'"]),
]


def test_a_broken_rule_is_reported() -> None:
    every(CASES, check_case)


WAYS = {
    LAYOUT: "'Ett|ttL'",
    "--pipeline-split": "balanced",
    EACH: "1",
    COUNT: "2",
    FIRST: "2",
    LAST: "2",
    EMBEDDING: "",
    LOSS: "",
}
GO_TOGETHER = [{EACH, COUNT}, {EACH, EMBEDDING}, {EACH, LOSS}, {EMBEDDING, LOSS}, {FIRST, LAST}] + [
    {COUNT, other} for other in ("--pipeline-split", FIRST, LAST, EMBEDDING, LOSS)
]


def test_two_ways_of_splitting_go_together_or_exclude_each_other() -> None:
    for one, other in itertools.combinations(WAYS, 2):
        found = reported(f"{PP} 2 {one} {WAYS[one]} {other} {WAYS[other]}", 2)
        excluding = [item for item in found if {one, other} <= set(item.flags) and "exclude each other" in item.message]
        assert len(excluding) == ({one, other} not in GO_TOGETHER), (one, other)


def test_each_rule_has_a_case() -> None:
    check_rules_have_cases(PIPELINE_RULES, CASES)


# (extra flags, world size, schedule, chunks of each stage)
VALID = [
    ("", 1, "1f1b", 1),
    (f"{PP} 2 --pipeline-schedule gpipe", 2, "gpipe", 1),
    (f"{PP} 4 --num-layers 7 --pipeline-schedule zb-h1", 4, "zb-h1", 1),
    (f"{PP} 2 --pipeline-schedule zb-v", 2, "zb-v", 2),
    (f"{PP} 2 --pipeline-schedule zb-v {COUNT} 2", 2, "zb-v", 2),
    (f"{PP} 2 --pipeline-schedule zb-v {EACH} 1", 2, "zb-v", 2),
    (f"{PP} 2 {COUNT} 1", 2, "1f1b", 1),
    (f"{PP} 2 --num-layers 7 {COUNT} 3", 2, "interleaved", 3),
    (f"{PP} 2 --num-layers 12 {EACH} 2", 2, "interleaved", 3),
    (f"{PP} 2 --num-layers 12 {EACH} 2 {COUNT} 3 --pipeline-schedule interleaved", 2, "interleaved", 3),
    (f"{PP} 4 --num-layers 14 {EACH} 2 {EMBEDDING} {LOSS}", 4, "interleaved", 2),
    (f"{PP} 2 --num-layers 8 {EACH} 4 --pipeline-schedule 1f1b", 2, "1f1b", 1),
    (f"{PP} 4 --num-layers 2 {EMBEDDING} {LOSS}", 4, "1f1b", 1),
    (f"{PP} 4 --num-layers 30 --pipeline-split balanced {COUNT} 2", 4, "interleaved", 2),
    (f"{PP} 4 --num-layers 10 {FIRST} 1 {LAST} 2", 4, "1f1b", 1),
    (f"{PP} 2 --num-layers 10 {FIRST} 3", 2, "1f1b", 1),
    (f"{PP} 2 --num-layers 12 {FIRST} 3 {LAST} 9 {COUNT} 3", 2, "interleaved", 3),
    (f"{PP} 2 --num-layers 3 {LAYOUT} 'Et|t|t|L'", 2, "interleaved", 2),
    (f"{PP} 2 --num-layers 3 {LAYOUT} 'Et|t|t|L' --pipeline-schedule zb-v", 2, "zb-v", 2),
    (f"{PP} 4 --num-layers 8 {LAYOUT} 'E|t*6|tt|L'", 4, "1f1b", 1),
    (f"--num-layers 8 {LAYOUT} 'Et*8L'", 1, "1f1b", 1),
    (f"--num-layers 8 {COUNT} 2", 1, "interleaved", 2),
    (f"{PP} 2 --global-batch-size 2 --no-overlap-p2p-communication --profile-pipeline", 2, "1f1b", 1),
]


def test_what_can_be_run_is_let_through() -> None:
    for extra, world_size, schedule, chunks in VALID:
        parallel = load(argv(extra), world_size).config.parallel
        found = parallel.schedule, parallel.get_chunks_per_stage(config_of(extra).model.num_layers)
        assert found == (schedule, chunks), extra


def test_the_message_shows_the_chunks() -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv(f"--num-layers 3 {PP} 2 --pipeline-schedule zb-v"), 2)
    assert str(caught.value) == (
        "--pipeline-model-parallel-size 2 x 2 virtual stages = 4 chunks is more than --num-layers 3.\n"
        "    chunk  stage  layers\n"
        "        0      0  embedding, 0-0 (1)\n"
        "        1      1  1-1 (1)\n"
        "        2      1  2-2 (1)\n"
        "        3      0  norm, output, loss\n"
        "  Each chunk holds at least one layer. Nearest valid: --pipeline-model-parallel-size 1, "
        "--pipeline-schedule None, --pipeline-model-parallel-layout 'Et|t|t|L', --num-layers 4."
    )


def test_a_long_table_is_cut_in_the_middle() -> None:
    (violation,) = reported(f"--num-layers 98 {PP} 2 {LAYOUT} 'E(t|)*99L'", 2)
    assert violation.table[1] == "    0      0  embedding, 0-0 (1)" and violation.table[-1] == "   99      1  norm, output, loss"
    assert violation.table[17] == "  ...  (100 chunks)" and len(violation.table) == 33


def test_a_layout_too_long_to_show_is_answered() -> None:
    """Numbers that make tables and suggestions of many megabytes."""
    for extra in (f"{LAYOUT} 'E(t|)*40000L'", f"{COUNT} 100000000000000", f"{FIRST} 100000000000000 {COUNT} 3"):
        found = reported(f"{PP} 3 {extra}", 3)
        assert found and len(str(ConfigError(found))) < 5000
    assert reported(f"{PP} 100000000000000 --num-layers 2 {LAYOUT} 'Et|tL'", 3)
