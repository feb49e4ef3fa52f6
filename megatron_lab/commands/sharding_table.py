"""Print Markdown tables of the memory and the communication of published models under each sharding strategy.

For example::

    python tools/sharding_table.py memory

The tool allocates no memory: it builds a rank's shard of each model on the meta device and counts it with the code of a run's
start-up log. It generates the tables of docs/data_parallel.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig, ShardingStrategy
from megatron.config.training import OptimizerConfig
from megatron.model.build import build_model
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.spec.schedules import build_schedule
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.state_layout import StateMemory, StateReport
from megatron_lab.planner.state_report import build_state_report

DATA_SIZES = (8, 64, 1024)
STRATEGIES: tuple[ShardingStrategy, ...] = get_args(ShardingStrategy)


@dataclass(frozen=True)
class PublishedModel:
    """Published model, with the tensor- and pipeline-parallel sizes and the number of microbatches for which the tables show it."""

    name: str
    model: ModelConfig
    vocab_size: int
    tensor_size: int = 1
    num_stages: int = 1
    num_microbatches: int = 8


_LLAMA = ModelConfig(
    seq_length=4096,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
MODELS = (
    # Brown et al. 2020, table 2.1, "GPT-3 XL"; with 16 heads of 128, which make up the hidden size.
    PublishedModel("GPT 1.3B", ModelConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048), 50257),
    # Llama 2, Touvron et al. 2023.
    PublishedModel(
        "Llama 7B",
        replace(_LLAMA, num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32),
        32000,
    ),
    PublishedModel(
        "Llama 70B",
        replace(
            _LLAMA,
            num_layers=80,
            hidden_size=8192,
            ffn_hidden_size=28672,
            num_attention_heads=64,
            group_query_attention=True,
            num_query_groups=8,
        ),
        32000,
        tensor_size=8,
    ),
    # Narayanan et al. 2021, table 1.
    PublishedModel(
        "GPT 1T",
        ModelConfig(num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048),
        51200,
        tensor_size=8,
        num_stages=64,
        num_microbatches=128,
    ),
)


PURPOSE_TABLE_CASE = (MODELS[1], 8)
"""Model and data-parallel size of the table by purpose."""


@dataclass(frozen=True)
class ModelReports:
    """Memory and traffic of a published model under each sharding strategy, for a rank of the first pipeline stage.

    The first stage needs the most memory: it has the embedding, and as many layers as any other stage.
    """

    published: PublishedModel
    data_size: int
    by_strategy: dict[str, StateReport]


_OFFLOADED, _ON_HOST = "optim, offloaded", "optim_grads_params, host"


def build_reports(published: PublishedModel, data_size: int) -> ModelReports:
    """Compute memory and traffic of a model under each sharding strategy, and under two strategies with offloading to host memory.

    All use bfloat16, Adam and overlapped gradient reduction.

    Args:
        data_size: number of data-parallel ranks.
    """
    model, num_stages = published.model, published.num_stages
    parallel = ParallelConfig(
        tensor_model_parallel_size=published.tensor_size,
        pipeline_model_parallel_size=num_stages,
        sequence_parallel=published.tensor_size > 1,
        overlap_grad_reduce=True,
    )
    # Two stages suffice: the first stage only needs to know the next one, and it takes long to create a large world.
    topology = Topology(tp=published.tensor_size, dp=data_size, pp=min(num_stages, 2))
    context = connect_fake(topology, 0)
    try:
        model_chunks = build_model(
            model,
            context,
            dtype=torch.bfloat16,
            vocab_size=published.vocab_size,
            sequence_parallel=parallel.sequence_parallel,
            seed=1,
            table=build_layer_table(model, parallel, published.vocab_size),
        )
        schedule = build_schedule(parallel.schedule, num_stages, published.num_microbatches)

        def build_report(strategy: ShardingStrategy, optimizer: OptimizerConfig, *, params_cpu: bool = False) -> StateReport:
            sharded = replace(parallel, data_parallel_sharding_strategy=strategy, fsdp_params_cpu=params_cpu)
            return build_state_report(model_chunks, context, sharded, optimizer, schedule)

        reports: dict[str, StateReport] = {strategy: build_report(strategy, OptimizerConfig()) for strategy in STRATEGIES}
        reports[_OFFLOADED] = build_report("optim", OptimizerConfig(optimizer_cpu_offload=True))
        reports[_ON_HOST] = build_report("optim_grads_params", OptimizerConfig(), params_cpu=True)
    finally:
        disconnect()
    return ModelReports(published, data_size, reports)


def iter_memory_table() -> Iterator[str]:
    """Yield the lines of the memory table. A cell shows GB per rank, as permanent state + temporary buffers."""
    yield f"| model | TP x PP | DP | {' | '.join(STRATEGIES)} |"
    yield _format_rule(3 + len(STRATEGIES))
    for reports in build_all_reports():
        cells = [_format_state(reports.by_strategy[strategy]) for strategy in STRATEGIES]
        yield f"| {_format_layout(reports)} | {' | '.join(cells)} |"


def iter_traffic_table() -> Iterator[str]:
    """Yield the lines of the traffic table: GB that each rank sends in a step."""
    yield f"| model | TP x PP | DP | microbatches | {' | '.join(STRATEGIES)} |"
    yield _format_rule(4 + len(STRATEGIES))
    for reports in build_all_reports():
        cells = [
            _format_gb(sum(group_traffic.bytes for group_traffic in reports.by_strategy[strategy].traffic))
            for strategy in STRATEGIES
        ]
        yield f"| {_format_layout(reports)} | {reports.published.num_microbatches} | {' | '.join(cells)} |"


def iter_purpose_table() -> Iterator[str]:
    """Yield the lines of a table that divides the memory of one model by purpose (parameters, gradients and so on), in GB per
    rank."""
    reports = build_reports(*PURPOSE_TABLE_CASE)
    purposes = [
        purpose
        for purpose in StateMemory().by_purpose
        if any(report.memory.by_purpose[purpose].total for report in reports.by_strategy.values())
    ]
    yield " | ".join(
        [
            f"| {reports.published.name}, DP {reports.data_size}",
            *(purpose.replace("_", " ") for purpose in purposes),
            "device | host |",
        ]
    )
    yield _format_rule(len(purposes) + 3)
    for name, report in reports.by_strategy.items():
        memory = report.memory
        cells = [*(memory.by_purpose[purpose].total for purpose in purposes), memory.total.device, memory.total.host]
        yield f"| {name} | {' | '.join(map(_format_gb, cells))} |"


TABLES = {"memory": iter_memory_table, "parts": iter_purpose_table, "traffic": iter_traffic_table}


@functools.cache
def build_all_reports() -> list[ModelReports]:
    """Compute memory and traffic of each model at each data-parallel size."""
    return [build_reports(published, data_size) for published in MODELS for data_size in DATA_SIZES]


def _format_layout(reports: ModelReports) -> str:
    return f"{reports.published.name} | {reports.published.tensor_size} x {reports.published.num_stages} | {reports.data_size:,}"


def _format_rule(num_columns: int) -> str:
    return "|" + "---|" * num_columns


def _format_state(report: StateReport) -> str:
    memory = report.memory
    state = _format_gb(memory.total.device - memory.buffers.device)
    return f"{state} + {_format_gb(memory.buffers.device)}" if memory.buffers.device else state


def _format_gb(num_bytes: int) -> str:
    """Format bytes as GB with three significant digits, or as an integer from 100 GB on."""
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table that the command line names and return the exit status."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "table",
        choices=TABLES,
        help="Print this table: memory is GB of a rank, parts their purpose, traffic GB that a rank sends in a step.",
    )
    print("\n".join(TABLES[parser.parse_args(arguments).table]()))
    return 0
