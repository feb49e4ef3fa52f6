"""Compare predicted with published memory of other frameworks' runs. The prediction uses the bytes per parameter and per activation
of their software.

    python tools/planning/published_memory.py

Schedules and the division of layers among stages are those of this project. The file `stacks.yaml` contains the bytes of each
software under `memory`, or the reason why its runs are not compared. They are the bytes of the state of a parameter, and the
constants in the activation bytes of a layer: s * b * h * `by_hidden` + a * s^2 * b * `by_scores`. Here s is the sequence length,
b the micro-batch size, h the hidden size, and a the number of heads (Korthikanti et al. 2022, section 4.1).
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
from megatron.pipeline_parallel.partition import Chunk, build_layer_table
from megatron.spec.operations import OpType
from megatron.spec.schedules import build_schedule
from megatron.spec.weights import WORD_EMBEDDING, iter_weights, split_layer_name
from megatron_lab.commands.against_published import COMMON, ROWS, format_summary, is_calibrated, list_published_files
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.advice import count_microbatches
from megatron_lab.planner.dry_run import limit_microbatches

_RELEASING_OPS = (OpType.BACKWARD, OpType.WEIGHT_GRAD)
"""Operations after which a layer's activations are released. In a split backward, that is the weight gradient."""


def load_stack_memory() -> dict[str, Any]:
    """Return the memory constants of each training software by its name, such as bytes per parameter. If the constants of a
    software are unknown, its value is a text with the reason."""
    stacks = yaml.safe_load((ROWS / "stacks.yaml").read_text())
    return {name: config["memory"] for name, config in stacks.items() if "memory" in config}


def predict_memory(row: Mapping[str, Any], stack_bytes: Mapping[str, float]) -> int:
    """Return the predicted peak memory of a published run in bytes, on its fullest rank.

    Tensor parallelism and recomputation are not supported.

    Args:
        row: the published run.
        stack_bytes: memory constants of the run's software: bytes per parameter (`state`), and activation bytes (`by_hidden`,
            `by_scores`).
    """
    argv = row["flags"].split()
    config = load([*argv, *COMMON], row["gpus"]).config
    model, parallel, micro_batch_size = config.model, config.parallel, config.training.micro_batch_size
    vocab_size, num_stages = int(argv[argv.index("--vocab-size") + 1]), parallel.pipeline_model_parallel_size
    num_tokens = micro_batch_size * model.seq_length
    layer_bytes = num_tokens * (
        model.hidden_size * stack_bytes["by_hidden"] + model.num_attention_heads * model.seq_length * stack_bytes["by_scores"]
    )
    table = build_layer_table(model, parallel, vocab_size, config.memory)
    num_microbatches = limit_microbatches(parallel.schedule, num_stages, count_microbatches(config, row["gpus"]))
    schedule = build_schedule(parallel.schedule, num_stages, num_microbatches, len(table) // num_stages)
    max_bytes = 0.0
    for stage, ops in enumerate(schedule.ops):
        num_live_layers = max_live_layers = 0
        for op in ops:
            num_live_layers += len(table[op.chunk].layers) * ((op.type is OpType.FORWARD) - (op.type in _RELEASING_OPS))
            max_live_layers = max(max_live_layers, num_live_layers)
        chunks = [chunk for chunk in table if chunk.stage == stage]
        max_bytes = max(
            max_bytes, layer_bytes * max_live_layers + stack_bytes["state"] * _count_stage_params(model, chunks, vocab_size)
        )
    return round(max_bytes)


def compute_relative_error(row: Mapping[str, Any], stack_bytes: Mapping[str, float]) -> float:
    """Return the ratio of the predicted to the published memory of a run, minus 1.

    Args:
        row: the published run.
        stack_bytes: memory constants of the run's software, as in `predict_memory`, and its bytes per gigabyte.
    """
    measured_bytes = row["memory_gb"] * stack_bytes["gigabyte"]
    return predict_memory(row, stack_bytes) / measured_bytes - 1


def _count_stage_params(model: ModelConfig, chunks: Sequence[Chunk], vocab_size: int) -> int:
    """Count the parameters of a pipeline stage. A tied word embedding counts on the first and on the last stage.

    Args:
        chunks: model chunks of the stage.
    """
    layers = {layer for chunk in chunks for layer in chunk.layers}
    has_first_chunk, has_last_chunk = any(chunk.is_first for chunk in chunks), any(chunk.is_last for chunk in chunks)
    num_params = 0
    for weight in iter_weights(model, vocab_size):
        layer, _ = split_layer_name(weight.name)
        if layer is None:
            is_embedding = weight.name.startswith("embedding")
            is_local = (has_first_chunk if is_embedding else has_last_chunk) or (
                has_last_chunk and weight.name == WORD_EMBEDDING and model.has_tied_embeddings
            )
        else:
            is_local = layer in layers
        num_params += is_local * math.prod(weight.shape)
    return num_params


def main() -> int:
    """Print the table of errors by publication, software and schedule. Return the exit status."""
    ToolParser(description=__doc__).parse_args()
    paths = list_published_files()
    errors_by_case = defaultdict[str, list[float]](list)
    num_skipped = Counter[tuple[str, str]]()
    stack_memory = load_stack_memory()
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            if row["memory_gb"] is None:
                continue
            stack_bytes = stack_memory[row["stack"]]
            if isinstance(stack_bytes, str):
                num_skipped[f"{path.stem}, {row['stack']}", stack_bytes] += 1
            elif not is_calibrated(row):
                errors_by_case[f"{path.stem}, {row['stack']}, {_get_schedule_name(row)}"].append(
                    compute_relative_error(row, stack_bytes)
                )
    for name, errors in sorted(errors_by_case.items()):
        print(f"{name:<50} {len(errors):4} rows {format_summary(errors)}")
    all_errors = [error for case_errors in errors_by_case.values() for error in case_errors]
    print(f"{'all':<50} {len(all_errors):4} rows {format_summary(all_errors)}")
    for (name, reason), count in sorted(num_skipped.items()):
        print(f"left out: {name}: {count} rows: {reason}")
    return 0


def _get_schedule_name(row: Mapping[str, Any]) -> str:
    """Return the pipeline schedule that the flags of a published run set."""
    argv = row["flags"].split()
    return str(argv[argv.index("--pipeline-schedule") + 1])
