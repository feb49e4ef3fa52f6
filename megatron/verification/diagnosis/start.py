"""Before the first step: every parameter is there once, as it should be initialised, with the values that it was given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from megatron.pipeline_parallel.partition import Chunk
from megatron.verification.diagnosis.comparison import Compared, Comparison
from megatron.verification.diagnosis.finding import Finding, Kind
from megatron.verification.diagnosis.places import layer_of, listing, place_words, stages_of


def start_findings(runs: Comparison) -> Iterator[Finding]:
    """What is wrong before anything is computed."""
    start = runs.observation.start
    yield from layer_findings(runs.table, runs.observation.config.model.num_layers, start)
    yield from _parameters(runs)
    yield from _values(runs, Kind.START, runs.start(), "is not what the run was given: values are loaded or published wrongly")
    yield from _values(
        runs,
        Kind.INITIAL,
        runs.initial(),
        "is initialised to other values than in one process: initialisation depends on the layout",
    )


def layer_findings(table: Sequence[Chunk], num_layers: int, parameters: Iterable[str] = ()) -> Iterator[Finding]:
    """Whether the table gives each layer to one chunk, in order.

    Args:
        parameters: names of the model's.
    """
    for layer in range(num_layers):
        chunks = [chunk for chunk in table if layer in chunk.layers]
        if len(chunks) == 1:
            continue
        name = f"layers.{layer}"
        if not chunks:
            text = "the layer is dropped: the layer table gives it to no stage, so it is never computed and never trained"
        else:
            text = f"the layer is doubled: chunks {listing(chunk.index for chunk in chunks)} both hold it"
        names = (name, *(each for each in parameters if layer_of(each) == layer))
        yield Finding(Kind.PARAMETERS, 0, place_words(name, table), text, math.inf, names, tuple(stages_of(name, table)))
    for before, chunk in pairwise(chunk for chunk in sorted(table, key=lambda chunk: chunk.index) if chunk.layers):
        first, last = chunk.layers[0], before.layers[-1]
        if first <= last:
            name = f"layers.{first}"
            behind = f"behind layer {last} of chunk {before.index}"
            text = f"the layers are out of order: chunk {chunk.index} begins with layer {first}, {behind}"
            yield Finding(Kind.PARAMETERS, 0, place_words(name, table), text, math.inf, (name,), tuple(stages_of(name, table)))
            return


def _parameters(runs: Comparison) -> Iterator[Finding]:
    """Each is held, whole, and no other is."""
    held, wanted = runs.start().joined, runs.observation.start
    for name, tensor in wanted.items():
        layer = layer_of(name)
        if layer is not None and not stages_of(name, runs.table):
            continue  # told of the whole layer
        if name not in held:
            yield Finding(Kind.PARAMETERS, 0, runs.place(name), "no rank holds it", math.inf, (name,))
        elif held[name].shapes != {tuple(tensor.shape)}:
            shapes = ", ".join(str(list(shape)) for shape in sorted(held[name].shapes))
            text = f"ranks take its whole shape for {shapes}; it is {list(tensor.shape)}"
            yield Finding(Kind.PARAMETERS, 0, runs.place(name), text, math.inf, (name,), runs.stages(name))
        elif held[name].holes:
            text = f"no rank holds {held[name].holes:,} of its {tensor.numel():,} elements"
            yield Finding(Kind.PARAMETERS, 0, runs.place(name), text, math.inf, (name,), runs.stages(name))
    for name in held:
        if name not in wanted:
            yield Finding(
                Kind.PARAMETERS, 0, runs.place(name), "the model of these settings has no such parameter", math.inf, (name,)
            )


def _values(runs: Comparison, kind: Kind, compared: Compared, text: str) -> Iterator[Finding]:
    """One finding for all that differ, named after the first in the order of the forward."""
    differing = compared.differing[::-1]
    if differing:
        first = compared.measured[differing[0]]
        yield Finding(
            kind,
            0,
            runs.place(differing[0]),
            f"{text} ({first.words()})",
            max(compared.measured[name].relative for name in differing),
            tuple(differing),
            runs.stages(differing[0]),
        )
