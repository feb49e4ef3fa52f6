"""Chunks (virtual stages) as the rules about the pipeline count and show them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.checks.finding import positive
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig, read_layout
from megatron.config.pipeline_layout import LayoutChunk
from megatron.spec.schedules import SCHEDULES

PP, LAYOUT = "pipeline_model_parallel_size", "pipeline_model_parallel_layout"
LAYERS_EACH, COUNT = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
COUNTS_CHUNKS = ("num_layers", PP, "pipeline_schedule", LAYOUT, LAYERS_EACH, COUNT, *COUNTED)
"""The settings on which the number of chunks depends."""

_LINES = 32  # of a table; of a longer one the middle is left out


def chunks_per_stage(config: Config) -> int | None:
    """Chunks on each pipeline rank, or None where another rule says why they are not known."""
    parallel = config.parallel
    given = [value for value in (getattr(parallel, LAYERS_EACH), getattr(parallel, COUNT)) if value is not None]
    if not positive(config.model.num_layers, parallel.pipeline_model_parallel_size, *given):
        return None
    try:
        return parallel.chunks_per_stage(config.model.num_layers)
    except ValueError:
        return None


def may_be_empty(config: Config) -> tuple[bool, bool]:
    """Whether the first and the last chunk may hold no layer: where the cost of embedding and loss counts."""
    parallel = config.parallel
    balanced = parallel.pipeline_split == "balanced"
    return parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split or balanced


def layout_of(config: Config) -> tuple[LayoutChunk, ...] | None:
    """The layout, or None where there is none that can be read."""
    text = config.parallel.pipeline_model_parallel_layout
    return None if text is None else read_layout(text)


def chunks_of(sizes: Sequence[int]) -> tuple[LayoutChunk, ...]:
    """Chunks of so many layers, with embedding and loss at the ends."""
    return tuple(LayoutChunk(index == 0, size, index == len(sizes) - 1) for index, size in enumerate(sizes))


def layout_text(chunks: Sequence[LayoutChunk]) -> str:
    """A layout as it is typed."""
    return "|".join("E" * chunk.embedding + _repeated(chunk.num_layers) + "L" * chunk.loss for chunk in chunks)


def chunk_table(config: Config, chunks: Sequence[LayoutChunk]) -> tuple[str, ...]:
    """What each chunk holds and where it lies, as lines of text."""
    lines, start = [], 0
    for index, chunk in enumerate(chunks):
        stop = start + chunk.num_layers
        parts = ["embedding"] * chunk.embedding
        parts += [f"{start}-{stop - 1} ({chunk.num_layers})"] * (stop > start)
        parts += ["norm, output, loss"] * chunk.loss
        lines.append(f"{index:5d}  {stage_of_chunk(config.parallel, index):5d}  {', '.join(parts) or 'nothing'}")
        start = stop
    if len(lines) > _LINES:
        lines[_LINES // 2 : 1 - _LINES // 2] = [f"  ...  ({len(lines)} chunks)"]
    return ("chunk  stage  layers", *lines)


def stage_of_chunk(parallel: ParallelConfig, index: int) -> int:
    """Position on the pipeline axis, of more chunks than the schedule takes as well."""
    schedule = SCHEDULES[parallel.schedule]
    places = schedule.place(parallel.pipeline_model_parallel_size, schedule.chunks_per_stage or 1)
    return places[index % len(places)]


def counted(config: Config) -> str:
    """The number of layers as a text, with what else counts as a layer."""
    parallel, layers = config.parallel, config.model.num_layers
    parts = [f"--num-layers {layers}"]
    parts += ["embedding"] * parallel.account_for_embedding_in_pipeline_split
    parts += ["loss"] * parallel.account_for_loss_in_pipeline_split
    return parts[0] if len(parts) == 1 else f"{' + '.join(parts)} = {parallel.units_to_split(layers)}"


def _repeated(layers: int) -> str:
    return "t" * layers if layers < 4 else f"t*{layers}"
