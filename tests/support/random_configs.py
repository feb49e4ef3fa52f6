"""Command lines drawn at random: most can be run on a few local ranks, a good share must be refused.

What belongs together is drawn together (layers for the pipeline, sizes that divide), so that most lines are valid; then some are
spoiled. Which of them are valid is for the rules to say: nothing here knows. Each number has a line, the same on every machine.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from megatron.config.parsed_flags import split_argv
from megatron.spec.schedules import SCHEDULES
from tests.support.cli import command_words
from tests.support.random_draws import Draw, chance, number, one_of, options
from tests.support.random_layout import draw_context, draw_experts, draw_layout
from tests.support.random_model import draw_attention, draw_model, without_adapters_beside
from tests.support.random_training import draw_eight_bits, draw_logging, draw_rule, draw_training


@dataclass(frozen=True)
class CommandLine:
    """The words behind the program's name, and the number of ranks."""

    argv: tuple[str, ...]
    world_size: int

    def __str__(self) -> str:
        """To be repeated: `bash tests/run.sh --fuzz-repeat` takes it."""
        return f"{self.world_size} {shlex.join(self.argv)}"


@st.composite
def settings_of_a_run(draw: Draw) -> tuple[dict[str, Any], int]:
    """Settings that are meant to be valid, by the names of their fields, and the world size."""
    ranks = one_of(draw, 2, 1, 2, 3, 4, 1, 4, 4, 5, 6, 6, 7, 8, 8)
    tp, pp, dp = draw(st.sampled_from([sizes for sizes in _SIZES if math.prod(sizes) == ranks]))
    settings = draw_layout(draw, tp, pp, dp)
    settings |= draw_model(draw, tp, bool(settings.get("sequence_parallel")))
    settings |= draw_attention(draw, settings)
    settings |= draw_training(draw, dp)
    if settings.get("data_parallel_sharding_strategy") == "optim_grads_params":
        settings.pop("grad_reduce_in_bf16", None)
    draw_rule(draw, settings)
    if settings.get("bf16") or settings.get("fp64"):
        settings |= draw_eight_bits(draw, settings, tp)
    if chance(draw, 5):
        settings |= options(draw, mtp_num_layers=[1, 2], mtp_loss_scaling_factor=[None, 0.5])
    settings |= draw_logging(draw)
    settings |= draw_context(draw, settings, dp)
    if chance(draw, 5):
        settings |= draw_experts(draw, settings, tp, tp * dp)
    return without_adapters_beside(settings), ranks


@st.composite
def command_lines(draw: Draw, spoiled: bool | None = None) -> CommandLine:
    """A command line.

    Args:
        spoiled: whether some settings are changed without regard to the others; by default of one line in three.
    """
    settings, world_size = draw(settings_of_a_run())
    if chance(draw, 3) if spoiled is None else spoiled:
        for _ in range(number(draw, 1, 3)):
            world_size = _spoil(draw, settings, world_size)
    return CommandLine(tuple(command_words(settings)), world_size)


_SIZES = [*itertools.product(range(1, 9), repeat=3)]
"""Tensor, pipeline and data sizes."""

_OTHERS: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (2, 3, 5),
    "pipeline_model_parallel_size": (2, 3, 5),
    "context_parallel_size": (2, 3),
    "cp_comm_type": (("a2a",), ("p2p", "all_gather")),
    "expert_model_parallel_size": (2,),
    "num_experts": (4, 5),
    "moe_router_topk": (3,),
    "sequence_parallel": (True,),
    "tp_comm_overlap": (True,),
    "pipeline_schedule": tuple(SCHEDULES),
    "num_layers_per_virtual_pipeline_stage": (1, 2, 3),
    "num_virtual_stages_per_pipeline_rank": (1, 2, 3),
    "pipeline_split": ("balanced",),
    "layer_costs": ("no/such/costs.json",),
    "decoder_first_pipeline_num_layers": (1, 2, 9),
    "decoder_last_pipeline_num_layers": (1, 2, 9),
    "account_for_loss_in_pipeline_split": (True,),
    "pipeline_model_parallel_layout": ("EttL", "Et|t|tL", "E|ttL", "Et|L|t", "(Et|)*2L", "Et*3"),
    "data_parallel_sharding_strategy": ("optim_grads_params", "optim"),
    "fsdp_shard_size": (2, 3),
    "fsdp_reduce_once": (True,),
    "fsdp_params_cpu": (True,),
    "overlap_param_gather": (True,),
    "loss_chunk_tokens": (0, 1, 7),
    "z_loss_coeff": (0.01,),
    "label_smoothing": (0.1, 1.0),
    "mtp_num_layers": (1, 40),
    "recompute_granularity": ("full", "selective"),
    "recompute_modules": (("mlp", "mlp_act"), ("layernorm",)),
    "recompute_num_layers": (2, 9),
    "recompute_layers_per_stage": ("1,1", "2,x"),
    "cpu_offload_activations": (True,),
    "cpu_offloading_num_layers": (1, 9),
    "compile": (True,),
    "compile_backend": ("aot_eager",),
    "compile_mode": ("max-autotune", "max-autotune-no-cudagraphs"),
    "swiglu": (True,),
    "squared_relu": (True,),
    "group_query_attention": (True,),
    "num_query_groups": (2, 3, 5),
    "qk_layernorm": (True,),
    "qk_layernorm_all_heads": (True,),
    "window_size": ("2,0", "3", "1,1"),
    "window_attn_skip_freq": ("2", "[1,0]", "[1"),
    "no_rope_freq": ("2", "[0]*3", "x"),
    "softmax_type": ("learnable",),
    "position_embedding_type": ("rope", "none"),
    "rotary_percent": (0.1, 0.5, 1.5),
    "use_rope_scaling": (True,),
    "max_position_embeddings": (3,),
    "kv_channels": (3, 5),
    "make_vocab_size_divisible_by": (1, 3),
    "global_batch_size": (5, 7, 12),
    "rampup_batch_size": ((2, 2, 8), (3, 1, 4)),
    "step_batch_size_schedule": ("0:2 40:6", "0:2,9:12", "0:1 1:2 2:12", "5:6", "0:8 30:4"),
    "train_samples": (7, 40),
    "train_iters": (1,),
    "train_epochs": (0.5, 1.0),
    "early_stopping_patience": (1,),
    "early_stopping_min_delta": (0.1,),
    "keep_best": (True,),
    "ckpt_step": ("best", 1),
    "iterations_to_skip": ((1,), (2, 9)),
    "spike_policy": ("warn", "rewind"),
    "spike_window": (3, 8),
    "spike_batches_beyond": (0,),
    "fp16": (True,),
    "bf16": (True,),
    "fp8_format": ("e4m3", "hybrid"),
    "fp8_recipe": ("rowwise", "blockwise"),
    "first_last_layers_bf16": (True,),
    "loss_scale": (8.0,),
    "min_loss_scale": (2.0**40,),
    "lr_decay_style": ("WSD", "constant"),
    "lr_warmup_fraction": (0.5,),
    "lr_warmup_iters": (1, 50),
    "min_lr": (1.0,),
    "lr_warmup_samples": (8,),
    "lr_decay_samples": (8,),
    "end_weight_decay": (0.5,),
    "weight_decay_incr_style": ("linear",),
    "optimizer": ("sgd",),
    "adam_beta1": (0.5,),
    "optimizer_cpu_offload": (True,),
    "optimizer_offload_fraction": (0.5,),
    "data_path": ("text",),
    "hf_dataset": ("texts",),
    "hf_valid_documents": (5,),
    "split": ("0,1", "1,2,3,4"),
    "data_order": ("megatron",),
    "multiple_validation_sets": (True,),
    "full_validation": (True,),
    "skip_train": (True,),
    "tokenizer_type": ("ByteTokenizer", "GPT2BPETokenizer"),
    "distributed_backend": ("nccl",),
}
"""Settings that may not go with the others."""


def _spoil(draw: Draw, settings: dict[str, Any], world_size: int) -> int:
    """Change something in place without regard to the rest. Returns the world size."""
    way = one_of(draw, "other", "other", "other", "other", "number", "number", "left out", "world")
    if way == "world":
        return one_of(draw, world_size + 1, 1, 6, 8)
    if way == "other":
        field = draw(st.sampled_from(sorted(_OTHERS)))
        settings[field] = draw(st.sampled_from(_OTHERS[field]))
        return world_size
    # Its default, and most other numbers, would make evaluations that take minutes.
    numbers = [field for field, value in settings.items() if type(value) is int and field != "eval_iters"]
    field = draw(st.sampled_from(numbers))
    if way == "left out":
        del settings[field]
    else:
        value = settings[field]
        settings[field] = one_of(draw, value + 1, value - 1, 2 * value, 3 * value, 0, -1)
    return world_size


# ---- one line, and simpler ones

_SIZE_FLAGS = ("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size")


def line_of(number: int) -> CommandLine:
    """The command line of a number."""
    found: list[CommandLine] = []

    # Of two examples the first is always the simplest line.
    @hypothesis.settings(
        max_examples=2,
        phases=[Phase.generate],
        database=None,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.seed(number)
    @hypothesis.given(command_lines())
    def draw(line: CommandLine) -> None:
        found.append(line)

    draw()
    return found[-1]


def simpler(line: CommandLine, fails: Callable[[CommandLine], bool], tries: int) -> CommandLine:
    """A line that fails, with fewer flags and smaller numbers as far as it still fails.

    Args:
        fails: whether a line fails in the same way.
        tries: lines looked at, at most.
    """
    left = tries
    changed = True
    while changed:
        changed = False
        for candidate in _changes(line):
            left -= 1
            if left < 0:
                return line
            if fails(candidate):
                line, changed = candidate, True
                break
    return line


def _changes(line: CommandLine) -> Iterator[CommandLine]:
    """The line on fewer data ranks, then without some of its flags (many first), then with smaller numbers."""
    if (copies := line.world_size // _ranks(line.argv)) > 1:
        yield from (CommandLine(line.argv, number * _ranks(line.argv)) for number in range(1, copies))
    parts = [(f"--{item.name}", *item.values) for item in split_argv(line.argv)[1]]
    for size in (len(parts) // 4, len(parts) // 8, 2, 1):
        for start in range(0, len(parts), max(1, size)):
            yield _joined(parts[:start] + parts[start + max(1, size) :], line)
    for index, part in enumerate(parts):
        if len(part) == 2 and part[1].isdigit() and int(part[1]) > 1:
            for smaller in (int(part[1]) // 2, int(part[1]) - 1):
                yield _joined([*parts[:index], (part[0], str(smaller)), *parts[index + 1 :]], line)


def _joined(parts: list[tuple[str, ...]], before: CommandLine) -> CommandLine:
    """A line for as many data ranks as before."""
    argv = tuple(word for part in parts for word in part)
    return CommandLine(argv, before.world_size // _ranks(before.argv) * _ranks(argv))


def _ranks(argv: tuple[str, ...]) -> int:
    """Tensor size x context size x pipeline size."""
    return math.prod(max(1, int(item.values[0])) for item in split_argv(argv)[1] if item.name in _SIZE_FLAGS)
