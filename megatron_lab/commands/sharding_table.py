"""Print, in markdown, what published models take on a rank and what they send under each sharding strategy.

For example::

    python tools/sharding_table.py memory

Nothing is allocated: a rank's part of each model is built on the meta device and counted by the code that writes the start-up log
of a run. The tables of docs/data_parallel.md are made by this.
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
from megatron.pipeline_parallel.partition import table_of
from megatron.spec.schedules import make_schedule
from megatron_lab.commands.parser import ToolParser
from megatron_lab.planner.state_layout import StateMemory, StateReport
from megatron_lab.planner.state_report import state_report

DATA_SIZES = (8, 64, 1024)
STRATEGIES: tuple[ShardingStrategy, ...] = get_args(ShardingStrategy)


@dataclass(frozen=True)
class Published:
    """A model and how it is divided."""

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
    Published("GPT 1.3B", ModelConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048), 50257),
    # Llama 2, Touvron et al. 2023.
    Published(
        "Llama 7B",
        replace(_LLAMA, num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32),
        32000,
    ),
    Published(
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
    Published(
        "GPT 1T",
        ModelConfig(num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048),
        51200,
        tensor_size=8,
        num_stages=64,
        num_microbatches=128,
    ),
)


PARTS_OF = (MODELS[1], 8)
"""Model and data size of the table of parts."""


@dataclass(frozen=True)
class Reports:
    """Of a rank of the first pipeline stage, which holds most: with the embedding, as many layers as any."""

    published: Published
    data_size: int
    by_strategy: dict[str, StateReport]


_OFFLOADED, _ON_HOST = "optim, offloaded", "optim_grads_params, host"


def reports_of(published: Published, data_size: int) -> Reports:
    """Under each strategy, and with the optimizer's state in host memory: in bfloat16 with Adam, reductions overlapped."""
    model, stages = published.model, published.num_stages
    parallel = ParallelConfig(
        tensor_model_parallel_size=published.tensor_size,
        pipeline_model_parallel_size=stages,
        sequence_parallel=published.tensor_size > 1,
        overlap_grad_reduce=True,
    )
    # Who knows the neighbour in the pipeline knows all that the first stage needs to know, and large worlds take long to make.
    topology = Topology(tp=published.tensor_size, dp=data_size, pp=min(stages, 2))
    context = connect_fake(topology, 0)
    try:
        built = build_model(
            model,
            context,
            dtype=torch.bfloat16,
            vocab_size=published.vocab_size,
            sequence_parallel=parallel.sequence_parallel,
            seed=1,
            table=table_of(model, parallel, published.vocab_size),
        )
        schedule = make_schedule(parallel.schedule, stages, published.num_microbatches)

        def under(strategy: ShardingStrategy, optimizer: OptimizerConfig, *, params_cpu: bool = False) -> StateReport:
            sharded = replace(parallel, data_parallel_sharding_strategy=strategy, fsdp_params_cpu=params_cpu)
            return state_report(built, context, sharded, optimizer, schedule)

        found: dict[str, StateReport] = {strategy: under(strategy, OptimizerConfig()) for strategy in STRATEGIES}
        found[_OFFLOADED] = under("optim", OptimizerConfig(optimizer_cpu_offload=True))
        found[_ON_HOST] = under("optim_grads_params", OptimizerConfig(), params_cpu=True)
    finally:
        disconnect()
    return Reports(published, data_size, found)


def memory_table() -> Iterator[str]:
    """GB of each rank: what stays, and with a plus what only passes through."""
    yield f"| model | TP x PP | DP | {' | '.join(STRATEGIES)} |"
    yield _rule(3 + len(STRATEGIES))
    for one in all_reports():
        cells = [_state_and_buffers(one.by_strategy[strategy]) for strategy in STRATEGIES]
        yield f"| {_layout(one)} | {' | '.join(cells)} |"


def traffic_table() -> Iterator[str]:
    """GB that each rank sends in a step."""
    yield f"| model | TP x PP | DP | microbatches | {' | '.join(STRATEGIES)} |"
    yield _rule(4 + len(STRATEGIES))
    for one in all_reports():
        cells = [_gb(sum(sent.bytes for sent in one.by_strategy[strategy].sent)) for strategy in STRATEGIES]
        yield f"| {_layout(one)} | {one.published.num_microbatches} | {' | '.join(cells)} |"


def parts_table() -> Iterator[str]:
    """GB of each rank by what they are for, for one row of the table of memory."""
    one = reports_of(*PARTS_OF)
    kinds = [kind for kind in StateMemory().parts if any(report.memory.parts[kind].total for report in one.by_strategy.values())]
    yield " | ".join(
        [f"| {one.published.name}, DP {one.data_size}", *(kind.replace("_", " ") for kind in kinds), "device | host |"]
    )
    yield _rule(len(kinds) + 3)
    for name, report in one.by_strategy.items():
        memory = report.memory
        cells = [*(memory.parts[kind].total for kind in kinds), memory.total.device, memory.total.host]
        yield f"| {name} | {' | '.join(map(_gb, cells))} |"


TABLES = {"memory": memory_table, "parts": parts_table, "traffic": traffic_table}


@functools.cache
def all_reports() -> list[Reports]:
    """Of each model at each data size."""
    return [reports_of(published, data_size) for published in MODELS for data_size in DATA_SIZES]


def _layout(one: Reports) -> str:
    return f"{one.published.name} | {one.published.tensor_size} x {one.published.num_stages} | {one.data_size:,}"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def _state_and_buffers(report: StateReport) -> str:
    memory = report.memory
    state = _gb(memory.total.device - memory.buffers.device)
    return f"{state} + {_gb(memory.buffers.device)}" if memory.buffers.device else state


def _gb(num_bytes: int) -> str:
    """In three digits, or whole GB."""
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = ToolParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument(
        "table", choices=TABLES, help="memory: GB of a rank; parts: what they are for; traffic: GB that a rank sends in a step"
    )
    print("\n".join(TABLES[flags.parse_args(arguments).table]()))
    return 0
