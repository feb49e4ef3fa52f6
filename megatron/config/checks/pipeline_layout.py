"""Rules about --pipeline-model-parallel-layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megatron.config.checks.chunks import COUNT, LAYERS_EACH, LAYOUT, PP, chunk_table, chunks_of, layout_of, layout_text
from megatron.config.checks.finding import Change, Finding, change, divisors, positive, rule, shown, try_values
from megatron.config.config import Config
from megatron.config.pipeline_layout import LayoutChunk, layout_problems

_MOST_MOVED = 1000  # layers that a suggested layout has more or fewer
_MOST_CHUNKS = 256  # of a suggested layout


@rule(LAYOUT)
def layout_can_be_read(config: Config, world_size: int) -> Iterator[Finding]:
    """The text follows the grammar, and embedding and loss stand at the ends."""
    text = config.parallel.pipeline_model_parallel_layout
    if text is not None and layout_of(config) is None:
        yield Finding(
            (LAYOUT,),
            f"{shown(config, LAYOUT)} cannot be used.",
            " ".join(layout_problems(text)),
            ((change(**{LAYOUT: f"E{re.sub('[ELm]', '', text)}L"}), change(**{LAYOUT: None})),),
        )


@rule("num_layers", LAYOUT, PP, "pipeline_schedule", LAYERS_EACH, COUNT)
def layout_places_every_layer(config: Config, world_size: int) -> Iterator[Finding]:
    """A layout has as many t as the model has layers."""
    layout, layers = layout_of(config), config.model.num_layers
    held = sum(chunk.num_layers for chunk in layout or ())
    if layout is None or not positive(layers) or held == layers:
        return
    missing = f"{f'Layer {held} is' if held == layers - 1 else f'Layers {held} to {layers - 1} are'} missing."
    yield Finding(
        (LAYOUT, "num_layers"),
        f"{shown(config, LAYOUT)} places {held} layer{'s' * (held != 1)} (t), but --num-layers is {layers}.",
        missing if held < layers else f"The model has no layers {layers} to {held - 1}.",
        (_with_layers(_sizes(layout), layers - held), (change(num_layers=held),) if held else (), (change(**{LAYOUT: None}),)),
        chunk_table(config, layout),
    )


@rule("num_layers", LAYOUT, PP, "pipeline_schedule", LAYERS_EACH, COUNT)
def layout_divides_among_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Each pipeline rank holds the same number of chunks of a layout."""
    layout, stages = layout_of(config), config.parallel.pipeline_model_parallel_size
    if layout is None or not positive(stages) or len(layout) % stages == 0:
        return
    yield Finding(
        (LAYOUT, PP),
        f"{shown(config, LAYOUT)} has {len(layout)} chunks, which do not divide among --pipeline-model-parallel-size {stages}.",
        "Each pipeline rank holds the same number of chunks; | ends a chunk.",
        (_with_chunks(_sizes(layout), stages), try_values(PP, stages, divisors(len(layout))), (change(**{LAYOUT: None}),)),
        chunk_table(config, layout) if sum(_sizes(layout)) == config.model.num_layers else (),  # else another rule shows it
    )


def _sizes(layout: Sequence[LayoutChunk]) -> list[int]:
    return [chunk.num_layers for chunk in layout]


def _with_layers(sizes: list[int], missing: int) -> tuple[Change, ...]:
    """The missing layers in the shortest chunks, or the superfluous ones out of the longest."""
    if abs(missing) > _MOST_MOVED or len(sizes) > _MOST_CHUNKS:
        return ()
    step = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        # Of equal ones the last without the loss.
        index = max(range(len(sizes)), key=lambda at: (-step * sizes[at], at < len(sizes) - 1, at))
        sizes[index] += step
    return (change(**{LAYOUT: layout_text(chunks_of(sizes))}),)


def _with_chunks(sizes: list[int], stages: int) -> tuple[Change, ...]:
    """The shortest neighbours joined until the chunks divide among the stages, or, where they are fewer, the longest chunks cut."""
    if max(len(sizes), stages) > _MOST_CHUNKS:
        return ()
    while len(sizes) % stages:
        if len(sizes) > stages:
            left = min(range(len(sizes) - 1), key=lambda at: sizes[at] + sizes[at + 1])
            sizes[left : left + 2] = [sizes[left] + sizes[left + 1]]
        else:
            longest = max(range(len(sizes)), key=lambda at: sizes[at])
            sizes[longest : longest + 1] = [sizes[longest] - sizes[longest] // 2, sizes[longest] // 2]
    return (change(**{LAYOUT: layout_text(chunks_of(sizes))}),)
