"""Rules about how layers are spread over the pipeline ranks: by count, by cost, or by hand at the ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from megatron.config.checks.chunks import COUNT, COUNTED, COUNTS_CHUNKS, LAYERS_EACH, LAYOUT, PP, chunks_per_stage
from megatron.config.checks.finding import (
    Finding,
    change,
    divisors,
    is_changed,
    multiples_near,
    positive,
    rule,
    shown,
    try_values,
    without,
)
from megatron.config.config import Config

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
SPLITS = ("pipeline_split", LAYERS_EACH, COUNT, FIRST, LAST, *COUNTED)
"""Settings that say how layers are spread, all but the layout."""

EXCLUSIONS = (
    ((LAYOUT,), SPLITS, "The layout says what every chunk holds, and how many there are."),
    (
        ("pipeline_split",),
        (LAYERS_EACH, FIRST, LAST, *COUNTED),
        "A balanced split chooses the layers of each chunk by cost.",
    ),
    (
        (LAYERS_EACH,),
        (FIRST, LAST),
        "Virtual stages then differ in length between the ranks; ask for them by --num-virtual-stages-per-pipeline-rank.",
    ),
    (COUNTED, (FIRST, LAST), "Layers at the ends are counted by hand, or embedding and loss count as layers."),
)
"""Settings that exclude others, with the reason."""


_HOLDS_A_LAYER = "Each virtual stage (chunk) holds at least one layer."


@rule(LAYOUT, *SPLITS)
def one_way_of_splitting(config: Config, world_size: int) -> Iterator[Finding]:
    """Each layer's place is decided once."""
    for ones, others, reason in EXCLUSIONS:
        those = [field for field in ones if is_changed(config, field)]
        these = [field for field in others if is_changed(config, field)]
        if those and these:
            yield Finding(
                (*those, *these),
                f"{_listed(config, those)} and {_listed(config, these)} exclude each other.",
                reason,
                ((without(config, *these), without(config, *those)),),
            )


def _listed(config: Config, fields: Iterable[str], between: str = ", ") -> str:
    return between.join(shown(config, field) for field in fields)


def _ends(config: Config) -> dict[str, int]:
    """Layers given to the first and the last rank; none where another rule has something against a number."""
    parallel = config.parallel
    ends = {field: count for field in (FIRST, LAST) if (count := getattr(parallel, field)) is not None}
    known = positive(config.model.num_layers, parallel.pipeline_model_parallel_size, *ends.values())
    return ends if known and parallel.pipeline_model_parallel_layout is None else {}


@rule(*COUNTS_CHUNKS, FIRST, LAST)
def ends_have_chunks(config: Config, world_size: int) -> Iterator[Finding]:
    """Layers given to the first or the last pipeline rank divide by its chunks, and it is not the only rank."""
    ends, stages = _ends(config), config.parallel.pipeline_model_parallel_size
    if ends and stages == 1:
        yield Finding(
            (*ends, PP),
            f"{_listed(config, ends, ' and ')} {_verb(ends, 'needs', 'need')} several pipeline ranks, but there is one.",
            "Other ranks hold the layers that the first and the last do not.",
            ((without(config, *ends),), (change(**{PP: 2}),)),
        )
        return
    each = chunks_per_stage(config) or 1
    for field, count in ends.items():
        if count % each:
            yield Finding(
                (field, COUNT),
                f"{shown(config, field)} does not divide by the {each} virtual stages of that rank.",
                "Each of them holds the same number of layers.",
                (
                    try_values(field, count, multiples_near(count, each)),
                    tuple(without(config, LAYERS_EACH, **{COUNT: number}) for number in reversed(divisors(count)) if number < each),
                    (without(config, field),),
                ),
            )


@rule(*COUNTS_CHUNKS, FIRST, LAST)
def ends_leave_layers(config: Config, world_size: int) -> Iterator[Finding]:
    """Layers given to the first and the last pipeline rank leave the others enough, and all where there are no others."""
    ends, layers, stages = _ends(config), config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if not ends or stages == 1:
        return
    each = chunks_per_stage(config) or 1
    others, total = stages - len(ends), sum(ends.values())
    if layers - total >= others * each if others else layers == total:
        return
    ranks = f"{others} other pipeline rank{'s' * (others > 1)}{f' with {each} virtual stages each' * (each > 1)}"
    if not others:
        what, rule = f"make {total} layers, not --num-layers {layers}", "There are no other pipeline ranks."
    elif total > layers:
        what, rule = f"{_verb(ends, 'is', 'are')} more than --num-layers {layers}", f"There must be layers for the {ranks}."
    else:
        what = f"{_verb(ends, 'leaves', 'leave')} {layers - total} of --num-layers {layers} to the {ranks}"
        rule = _HOLDS_A_LAYER if each > 1 else "Each pipeline stage holds at least one layer."
    most = layers - others * each  # that the ends can have together
    yield Finding(
        (*ends, "num_layers", PP, *([COUNT] if each > 1 else [])),
        f"{_listed(config, ends, ' and ')} {what}.",
        rule,
        (
            *(try_values(field, count, [(most - total + count) // each * each]) for field, count in ends.items()),
            (change(num_layers=total + others * each),),
            try_values(PP, stages, range(2, min(stages, 64))),
            tuple(without(config, LAYERS_EACH, **{COUNT: number}) for number in range(min(each - 1, 32), 0, -1)),
            tuple(without(config, field) for field in ends),
        ),
    )


def _verb(ends: Collection[str], one: str, several: str) -> str:
    return one if len(ends) == 1 else several
