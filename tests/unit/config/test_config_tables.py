"""Rules and layer table agree: settings that pass the rules give a table, and the table is the one that they describe."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.checks.finding import Finding, format_setting, is_set
from megatron.config.checks.pipeline import assign_stages, build_chunks, format_layout
from megatron.config.config import Config
from megatron.config.flags import get_flags
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import LayoutChunk, parse_layout
from megatron.pipeline_parallel.partition import Chunk, build_layer_table
from megatron.spec.schedules import SCHEDULES, assign_chunks
from tests.support.rule_cases import PIPELINE_RULES, check_suggestions, config_of, reported

VOCABULARY = 100

many = hypothesis.settings(max_examples=max(100, hypothesis.settings().max_examples))
"""Each example is quick, and the settings have many combinations."""


def layouts(num_layers: int, num_stages: int) -> st.SearchStrategy[str]:
    """Texts that often describe a layout that fits."""
    cuts = st.integers(1, 3).flatmap(
        lambda chunks: st.lists(st.integers(0, num_layers), min_size=chunks * num_stages - 1, max_size=chunks * num_stages - 1)
    )
    fitting = cuts.map(sorted).map(
        lambda ends: format_layout(
            build_chunks([stop - start for start, stop in zip([0, *ends], [*ends, num_layers], strict=True)])
        )
    )
    sizes = st.lists(st.integers(0, 3), min_size=1, max_size=8)
    return st.one_of(fitting, fitting, sizes.map(build_chunks).map(format_layout), st.text("EtLm|()*23, ", min_size=1, max_size=12))


EACH, COUNT = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
VIRTUAL: list[tuple[str, ...]] = [(), (), (COUNT,), (COUNT,), (EACH,), (EACH, COUNT)]
SPLITS: list[tuple[str, ...]] = [
    (),
    (FIRST,),
    (LAST,),
    (FIRST, LAST),
    (EMBEDDING,),
    (LOSS,),
    (EMBEDDING, LOSS),
    ("pipeline_split",),
]


@st.composite
def settings(draw: st.DrawFn) -> Config:
    """Settings of the pipeline, of which a good part can be run."""
    num_stages = draw(st.integers(1, 5))
    num_layers = draw(st.one_of(st.integers(1, 30), st.integers(1, 12).map(lambda each: each * num_stages)))
    values: dict[str, st.SearchStrategy[object]] = {
        EACH: st.integers(1, 4),
        COUNT: st.integers(1, 3),
        FIRST: st.integers(1, 8),
        LAST: st.integers(1, 8),
        EMBEDDING: st.just(True),
        LOSS: st.just(True),
        LAYOUT: layouts(num_layers, num_stages),
        "pipeline_split": st.just("balanced"),
        "pipeline_schedule": st.sampled_from(sorted(SCHEDULES)),
    }
    names = {*draw(st.sampled_from(VIRTUAL)), *draw(st.sampled_from(SPLITS)), *draw(st.sampled_from([(), ("pipeline_schedule",)]))}
    if draw(st.integers(0, 3)) == 0:  # mostly alone
        names = {LAYOUT, *draw(st.sets(st.sampled_from(sorted(names)), max_size=1))} if names else {LAYOUT}
    chosen = {name: draw(values[name]) for name in sorted(names)}
    return dataclasses.replace(
        config_of(""),
        model=dataclasses.replace(config_of("").model, num_layers=num_layers),
        parallel=ParallelConfig(pipeline_model_parallel_size=num_stages, **chosen),  # type: ignore[arg-type]
    )


def findings(config: Config) -> dict[str, list[Finding]]:
    """What the rules about the pipeline report, by rule."""
    found = {rule.check.__name__: list(rule(config, config.parallel.pipeline_model_parallel_size)) for rule in PIPELINE_RULES}
    return {name: items for name, items in found.items() if items}


def table(config: Config) -> list[Chunk] | None:
    """The layer table, or None where there can be none."""
    try:
        return build_layer_table(config.model, config.parallel, VOCABULARY)
    except ValueError:
        return None


def asks_too_much(config: Config) -> set[str]:
    """Rules that refuse settings for which there would be a table: they contradict each other, or ask for nothing."""
    parallel, rules = config.parallel, set()
    if parallel.num_layers_per_virtual_pipeline_stage is not None and parallel.num_virtual_stages_per_pipeline_rank is not None:
        rules.add("check_layers_divisible_by_virtual_stages")
    if parallel.pipeline_model_parallel_size == 1:
        rules.add("check_end_layers_divisible_by_chunks")
    if parallel.schedule == "interleaved":
        rules.add("check_schedule_supports_virtual_stages")
    return rules


@many
@given(settings())
def test_the_rules_accept_what_has_a_table(config: Config) -> None:
    found, chunks = findings(config), table(config)
    if not found:
        assert chunks is not None
    elif chunks is not None and "check_single_split_method" not in found:
        assert set(found) <= asks_too_much(config), found


@many
@given(settings())
def test_the_table_is_as_asked(config: Config) -> None:
    found, chunks, parallel = findings(config), table(config), config.parallel
    if found or chunks is None:
        return
    stages, each = parallel.pipeline_model_parallel_size, parallel.get_chunks_per_stage(config.model.num_layers)
    sizes = [len(chunk.layers) for chunk in chunks]
    held = [sum(len(chunk.layers) for chunk in chunks if chunk.stage == stage) for stage in range(stages)]
    assert len(chunks) == stages * each and SCHEDULES[parallel.schedule].supports(each)
    assert [chunk.stage for chunk in chunks] == list(assign_chunks(parallel.schedule, stages, each))
    if parallel.pipeline_model_parallel_layout is not None:
        assert sizes == [chunk.num_layers for chunk in parse_layout(parallel.pipeline_model_parallel_layout)]
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        units = list(sizes)
        units[0] += parallel.account_for_embedding_in_pipeline_split
        units[-1] += parallel.account_for_loss_in_pipeline_split
        assert set(units) == {parallel.num_layers_per_virtual_pipeline_stage}
    assert parallel.decoder_first_pipeline_num_layers in (None, held[0])
    assert parallel.decoder_last_pipeline_num_layers in (None, held[-1])


@given(settings())
def test_what_is_suggested_is_valid(config: Config) -> None:
    """As typed, quotes included."""
    extra = " ".join(format_setting(config, field) for field in ("num_layers", *vars(config.parallel)) if is_set(config, field))
    stages = config.parallel.pipeline_model_parallel_size
    check_suggestions(extra, stages, reported(extra, stages))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 4))
def test_chunks_are_shown_where_the_schedule_places_them(name: str, num_stages: int, chunks_per_stage: int) -> None:
    fixed = SCHEDULES[name].chunks_per_stage
    assert SCHEDULES[name].supports(chunks_per_stage) == (chunks_per_stage == fixed if fixed is not None else chunks_per_stage > 1)
    places = assign_chunks(name, num_stages, fixed or chunks_per_stage)
    parallel = ParallelConfig(pipeline_model_parallel_size=num_stages, pipeline_schedule=name)
    assert assign_stages(parallel, len(places)) == places
    assert assign_stages(parallel, num_stages) == places[:num_stages]


def test_every_schedule_can_be_asked_for() -> None:
    assert get_flags()["pipeline-schedule"].choices == tuple(SCHEDULES)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).map(build_chunks))
def test_a_layout_is_typed_as_it_is_read(layout: tuple[LayoutChunk, ...]) -> None:
    assert parse_layout(format_layout(layout)) == layout
