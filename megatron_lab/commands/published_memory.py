"""Memory as peers' publications say that their software keeps it, against what they measured.

    python tools/planning/published_memory.py

It takes our schedules and our division of layers among stages, and the software's own bytes: of a parameter's state, and of what a
layer keeps for backward, s b h x `by_hidden` + a s^2 b x `by_scores` (Korthikanti et al. 2022, section 4.1; a heads). They stand in
`stacks.yaml` under `memory`, or in their place why the rows of that software are left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron.config.cli import load
from megatron.config.model import ModelConfig
from megatron.pipeline_parallel.partition import Chunk, table_of
from megatron.spec.operations import OpKind
from megatron.spec.schedules import make_schedule
from megatron.spec.weights import WORD_EMBEDDING, in_layer, model_weights
from megatron_lab.commands.against_published import COMMON, ROWS, calibrated, published_files, summary
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.advice import num_microbatches
from megatron_lab.planner.dry_run import enough_microbatches

_FREES = (OpKind.BACKWARD, OpKind.WEIGHT_GRAD)
"""Operations after which a layer's activations are gone: those of a backward in two halves stay until the second."""


def stack_memory() -> dict[str, Any]:
    """For each software, what it keeps (a mapping), or why that is not known (words)."""
    stacks = yaml.safe_load((ROWS / "stacks.yaml").read_text())
    return {name: given["memory"] for name, given in stacks.items() if "memory" in given}


def predicted(row: Mapping[str, Any], keeps: Mapping[str, float]) -> int:
    """Bytes that the fullest rank of a job without tensor ranks or recompute holds at once."""
    words = row["flags"].split()
    config = load([*words, *COMMON], row["gpus"]).config
    model, parallel, size = config.model, config.parallel, config.training.micro_batch_size
    vocab_size, stages = int(words[words.index("--vocab-size") + 1]), parallel.pipeline_model_parallel_size
    tokens = size * model.seq_length
    layer = tokens * (model.hidden_size * keeps["by_hidden"] + model.num_attention_heads * model.seq_length * keeps["by_scores"])
    table = table_of(model, parallel, vocab_size, config.memory)
    count = enough_microbatches(parallel.schedule, stages, num_microbatches(config, row["gpus"]))
    schedule = make_schedule(parallel.schedule, stages, count, len(table) // stages)
    most = 0.0
    for stage, ops in enumerate(schedule.ops):
        kept = peak = 0
        for op in ops:
            kept += len(table[op.chunk].layers) * ((op.kind is OpKind.FORWARD) - (op.kind in _FREES))
            peak = max(peak, kept)
        chunks = [one for one in table if one.stage == stage]
        most = max(most, layer * peak + keeps["state"] * _parameters(model, chunks, vocab_size))
    return round(most)


def error(row: Mapping[str, Any], keeps: Mapping[str, float]) -> float:
    """Predicted over measured bytes, less 1."""
    measured = row["memory_gb"] * keeps["gigabyte"]
    return predicted(row, keeps) / measured - 1


def _parameters(model: ModelConfig, chunks: Sequence[Chunk], vocab_size: int) -> int:
    """Those of a stage; a tied word embedding is on the first and on the last."""
    layers = {layer for chunk in chunks for layer in chunk.layers}
    first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
    found = 0
    for weight in model_weights(model, vocab_size):
        layer, _ = in_layer(weight.name)
        if layer is None:
            embeds = weight.name.startswith("embedding")
            held = (first if embeds else last) or (last and weight.name == WORD_EMBEDDING and model.tied)
        else:
            held = layer in layers
        found += held * math.prod(weight.shape)
    return found


def main() -> int:
    """Print the table."""
    ToolParser(description=__doc__).parse_args()
    files = published_files()
    by = defaultdict[str, list[float]](list)
    left_out = Counter[tuple[str, str]]()
    known = stack_memory()
    for path in files:
        for row in json.loads(path.read_text())["rows"]:
            if row["memory_gb"] is None:
                continue
            keeps = known[row["stack"]]
            if isinstance(keeps, str):
                left_out[f"{path.stem}, {row['stack']}", keeps] += 1
            elif not calibrated(row):
                by[f"{path.stem}, {row['stack']}, {_schedule(row)}"].append(error(row, keeps))
    for name, found in sorted(by.items()):
        print(f"{name:<50} {len(found):4} rows {summary(found)}")
    print(f"{'all':<50} {sum(map(len, by.values())):4} rows {summary([one for some in by.values() for one in some])}")
    for (name, why), count in sorted(left_out.items()):
        print(f"left out: {name}: {count} rows: {why}")
    return 0


def _schedule(row: Mapping[str, Any]) -> str:
    """The schedule of a row."""
    words = row["flags"].split()
    return str(words[words.index("--pipeline-schedule") + 1])
