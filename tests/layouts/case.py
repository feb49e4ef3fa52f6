"""One description of a training run that can have every feature at once, made into a recipe and a layout.

A case gives each axis a setting; an axis that it leaves out has its default. `test_layouts.py` runs cases against the reference.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.memory import MemoryConfig
from megatron.config.parallel import CpCommType
from megatron.config.rules import find_violations
from megatron.config.training import OptimizerConfig, TrainingConfig
from megatron.data.samples import DocumentRules
from megatron.model.compiled import BlockCompiler
from megatron.spec.schedules import SCHEDULES
from megatron_lab.verification.reference.experts import ExpertsShape
from megatron_lab.verification.reference.model import Batch, EodRules
from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, build_random_weights
from megatron_lab.verification.reference_run import build_rule_options
from tests.support.covering import Case
from tests.support.layout import Layout, Recipe, model_config, optimizer_config, parallel_config
from tests.support.reference_runs import (
    ReferenceRun,
    deepseek_like,
    gpt2_like,
    llama_like,
    loss_of_documents_apart,
    loss_with_rules,
    mean_loss,
    random_batches,
    train,
)

VOCAB, EOD = 29, 5  # the vocabulary divides by no tensor size: the last rank holds padding

DEFAULTS: Case = {
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "dp": 1,
    "ep": 1,
    "etp": None,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "split": "even",
    "microbatches": 2,
    "micro_batch_size": 1,
    "sequence_parallel": False,
    "sharding": "no_shard",
    "overlap": False,
    "overlap_p2p": True,
    "overlap_param_gather": False,
    "pp_before_dp": False,
    "bucket_size": 500,
    "fsdp_shard_size": None,
    "fsdp_way": "always",
    "offload": None,
    "attention": "auto",
    "way": None,
    "dispatcher": None,
    "memory": "kept",
    "loss_chunk": 0,
    "compiled": False,
    "style": "llama",
    "tied": False,
    "grouped": None,
    "experts": None,
    "depths": 0,
    "z_loss": 0.0,
    "smoothing": 0.0,
    "lora": None,
    "documents": None,
    "rule": "adam",
}
"""Every axis, with what a case has that says nothing of it."""

# ---- models

# Within a sequence of 16 tokens each of these changes some frequencies, by its own formula. By the second, what a position turns
# depends on the length of the whole sequence.
YARN = RotaryScaling("yarn", 4.0, 12, 0.05, 1.0, rounds_bounds=False, attention_factor=1.2)
LONGROPE = RotaryScaling("longrope", 1.0, 9, attention_factor=0.9, short_factors=(9.0, 9.0), long_factors=(1.0, 4.0))
LATENT = LatentShape(
    q_lora_rank=None, kv_lora_rank=6, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=5
)  # values of the size of queries
STYLES: dict[str, tuple[Callable[..., ReferenceShape], Mapping[str, Any]]] = {
    "gpt2": (gpt2_like, {}),
    "llama": (llama_like, {}),
    "deepseek": (deepseek_like, {}),
    # True gradients of a key's bias are zero: rules that divide by the size of a gradient make noise of its rounding error.
    "gpt2 without biases": (gpt2_like, {"bias": False}),
    "no positions": (gpt2_like, {"positions": "none"}),
    "llama, norms of heads": (llama_like, {"qk_norm": True}),
    "llama capped": (llama_like, {"logit_cap": 0.6}),
    # Parts of today's models: each has several that are new together, between them every part is there.
    "sandwich": (
        llama_like,
        {
            "norms": "sandwich",
            "zero_centred": True,
            "qk_norm": True,
            "activation": "geglu",
            "embedding_multiplier": 4.0,
            "logit_cap": 0.5,
        },
    ),
    "post": (
        llama_like,
        {"norms": "post", "residual_multiplier": 0.3, "activation": "geglu_exact", "output_multiplier": 0.25},
    ),
    "parallel": (gpt2_like, {"positions": "rope", "rotary_percent": 0.5, "parallel": True, "activation": "gelu_exact"}),
    "bare": (
        gpt2_like,
        {
            "norm_weight": False,
            "positions": "rope",
            "activation": "quick_geglu",
            "offset": 1.0,
            "clamp": 0.3,
            "embedding_norm": True,
        },
    ),
    "parallel-sandwich": (
        gpt2_like,
        {
            "norms": "sandwich",
            "parallel": True,
            "norm_bias": False,
            "zero_centred": True,
            "activation": "relu",
            "logit_cap": 1.0,
            "embedding_norm": True,
        },
    ),
    # Layers of several kinds, which lie otherwise on stages.
    "two bases": (llama_like, {"windows": (3, 3, None, 3), "local_base": 20.0, "unrotated": (False, False, False, True)}),
    "sinks": (llama_like, {"windows": (2, None), "sink": "learned", "qkv_bias": True, "output_bias": True}),
    "capped": (gpt2_like, {"windows": (None, 4), "score_cap": 0.5, "score_scale": 0.4, "sink": "one"}),
    "norms over all heads": (llama_like, {"qk_norm": True, "qk_norm_all_heads": True, "windows": (None, None, 1, 1)}),
    "latents": (deepseek_like, {"rope_scaling": YARN, "score_scale": 0.3}),
    "latents, windows": (deepseek_like, {"windows": (3, None), "sink": "learned", "latent": LATENT, "qk_norm": False}),
    "yarn": (llama_like, {"rope_scaling": YARN}),
    "longrope": (llama_like, {"rope_scaling": LONGROPE}),
}
KINDS: dict[str, Callable[[tuple[bool, ...], tuple[bool, ...]], ExpertsShape]] = {
    "top 2": lambda each, some: ExpertsShape(each, 4, 2, 8, aux_loss_scope="microbatch", aux_loss_coeff=0.3),
    "top 1, first softmax, shares of the update before": lambda each, some: ExpertsShape(
        some, 4, 1, 8, score_function="softmax first", aux_loss_scope="update before", aux_loss_coeff=0.4, z_loss_coeff=0.05
    ),
    "sigmoids in groups with biases, shared": lambda each, some: ExpertsShape(
        *(some, 8, 4, 4, 8),
        score_function="sigmoid",
        scaling_factor=2.5,
        num_groups=4,
        group_top_k=2,
        aux_loss_scope="sequence",
        aux_loss_coeff=0.2,
        bias_update_rate=0.05,
    ),
    "top 4, gated shared, dropped by probability": lambda each, some: ExpertsShape(
        *(each, 8, 4, 4, 8, True),
        score_function="softmax first",
        aux_loss_scope="microbatch",
        aux_loss_coeff=0.5,
        z_loss_coeff=0.1,
        capacity_factor=1.0,
    ),
    "dropped by position, padded": lambda each, some: ExpertsShape(
        some, 4, 1, 8, 8, score_function="sigmoid", bias_update_rate=0.1, capacity_factor=1.25, drops_by_position=True
    ),
}
"""Experts of a model in which every layer has them, or some layers."""

MEMORIES = {
    "kept": MemoryConfig(),
    "full": MemoryConfig("full"),
    "full in groups of two": MemoryConfig("full", recompute_num_layers=2),
    "the first of each chunk": MemoryConfig("full", recompute_method="block"),
    "three of the first stage, one of the second": MemoryConfig("full", recompute_method="block", recompute_layers_per_stage="3,1"),
    "norms and activations": MemoryConfig("selective", recompute_modules=("layernorm", "mlp_act")),
    "the mlp": MemoryConfig("selective", recompute_modules=("mlp",)),
    "norms and the mlp": MemoryConfig("selective", recompute_modules=("layernorm", "mlp")),
    "attention, norms, activations": MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act")),
    "host": MemoryConfig(cpu_offload_activations=True),
    "full, host": MemoryConfig("full", cpu_offload_activations=True),
    "norms and the mlp, one layer of each chunk in host memory": MemoryConfig(
        "selective", recompute_modules=("layernorm", "mlp"), cpu_offloading_num_layers=1
    ),
    "attention and norms, host": MemoryConfig(
        "selective", recompute_modules=("core_attn", "layernorm"), cpu_offload_activations=True
    ),
    "attention, norms, the mlp, host": MemoryConfig(
        "selective", recompute_modules=("core_attn", "layernorm", "mlp"), cpu_offload_activations=True
    ),
}
"""What happens to activations."""

MUON: dict[str, dict[str, Any]] = {
    "muon": {"muon_use_nesterov": True, "muon_extra_scale_factor": 0.2},
    "muon, heads": {"muon_split_heads": True, "muon_momentum": 0.8, "muon_scale_mode": "unit_rms_norm"},
    "muon, fused": {
        "muon_no_split_qkv": True,
        "muon_num_ns_steps": 4,
        "muon_scale_mode": "shape_scaling",
        "muon_use_nesterov": True,
    },
    "muon, three, even steps": {"muon_num_ns_steps": 2},
}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {}),
    "lion": ("lion", {"lion_beta1": 0.8, "lion_beta2": 0.95}),
    "ademamix": ("ademamix", {"ademamix_warmup_iters": 3, "ademamix_beta3": 0.99}),
    "adafactor": ("adafactor", {}),
    "adafactor, relative": (
        "adafactor",
        {"adafactor_relative_step": True, "adafactor_beta1": 0.9, "adafactor_clip_threshold": 0.5, "adafactor_least_scale": 0.12},
    ),
    "lamb": ("lamb", {}),
    "adam8bit": ("adam8bit", {"adam_8bit_block_size": 5}),
    "adam8bit, long blocks": ("adam8bit", {"adam_8bit_block_size": 12}),
    **{name: ("muon", settings) for name, settings in MUON.items()},
}
"""Update rules."""
WAYS: dict[str | None, tuple[CpCommType, ...]] = {
    None: ("all_gather",),
    "all_gather": ("all_gather",),
    "p2p": ("p2p",),
    "a2a": ("a2a",),
    "each": ("a2a", "p2p", "all_gather"),
}
"""Ways in which context ranks share keys and values, in the layers in turn."""
FSDP_WAYS: dict[str, dict[str, Any]] = {
    "always": {},
    "never": {"fsdp_reshard": "never"},
    "once": {"reduce_once": True},
    "host": {"params_cpu": True},
}
LORA = ("attention.qkv,attention.output,mlp.up,mlp.down", "attention.qkv,mlp.down", "attention.output", "mlp.up")
ATTENDING = ("two bases", "sinks", "capped", "norms over all heads", "latents, windows")
LATENTS = ("deepseek", "latents", "latents, windows")
PLAIN_STYLES = ("gpt2", "llama", "deepseek", "no positions")


def chunks_of(schedule: str) -> int:
    """Fewest chunks of a stage."""
    return SCHEDULES[schedule].chunks_per_stage or 2


def kv_heads(tp: int, style: str, grouped: bool | None) -> int:
    """Half as many as query heads, or as many. Where nothing is said: half, if the style is a llama's and each rank gets one."""
    if grouped is None:
        grouped = STYLES[style][0] is llama_like and tp <= 4
    return heads(tp) // (2 if grouped else 1)


def heads(tp: int) -> int:
    """Query heads."""
    return 6 if tp == 3 else 8


def has_biases(style: str) -> bool:
    """Whether linear layers have biases."""
    like, parts = STYLES[style]
    return like is gpt2_like and parts.get("bias", True)


CONSTRAINTS: list[Callable[..., bool]] = [
    lambda tp, cp, pp, dp: tp * cp * pp * dp <= 8,
    lambda tp, sequence_parallel: tp > 1 or not sequence_parallel,
    lambda pp, schedule: pp > 1 or schedule in ("1f1b", "zb-h1", "zb-v"),
    lambda schedule, virtual_stages: SCHEDULES[schedule].supports(virtual_stages),
    lambda pp, virtual_stages: virtual_stages < 3 or pp <= 4,
    lambda pp, split: pp > 1 or split == "even",
    lambda pp, overlap_p2p: pp > 1 or overlap_p2p,
    lambda dp, sharding, overlap_param_gather: not overlap_param_gather or (sharding in ("optim", "optim_grads") and dp > 1),
    lambda sharding, schedule: sharding != "optim_grads_params" or not SCHEDULES[schedule].splits_backward,  # refused
    lambda pp, dp, pp_before_dp: not pp_before_dp or (pp > 1 and dp > 1),
    lambda ep, pp_before_dp: ep == 1 or not pp_before_dp,
    lambda dp, sharding, fsdp_shard_size: (
        fsdp_shard_size is None or (sharding == "optim_grads_params" and dp % fsdp_shard_size == 0 and fsdp_shard_size < dp)
    ),
    lambda sharding, fsdp_way: fsdp_way == "always" or sharding == "optim_grads_params",
    lambda microbatches, fsdp_way: fsdp_way != "once" or microbatches > 1,
    lambda cp, way: (way is None) == (cp == 1),
    lambda tp, cp, style, grouped, way: way not in ("a2a", "each") or kv_heads(tp, style, grouped) // tp % cp == 0,
    lambda cp, attention, style: attention == "auto" or (cp == 1 and style in PLAIN_STYLES),
    lambda tp, style, grouped: kv_heads(tp, style, grouped) % tp == 0,
    lambda style, grouped: not (style in LATENTS and grouped),
    lambda tp, style: tp != 3 or style not in LATENTS,
    lambda style, documents: style != "longrope" or documents is None,  # apart, documents are shorter sequences
    # Experts
    lambda experts, style: experts is None or not has_biases(style),
    lambda style, ep: not has_biases(style) or ep == 1,
    lambda style, etp: not has_biases(style) or etp is None,
    lambda style, dispatcher: not has_biases(style) or dispatcher is None,
    lambda experts, ep: experts is not None or ep == 1,
    lambda experts, etp: experts is not None or etp is None,
    lambda experts, dispatcher: (experts is None) == (dispatcher is None),
    lambda tp, ep, etp, dispatcher: dispatcher != "allgather" or ep * (tp if etp is None else etp) > 1,
    lambda experts, tp, sequence_parallel: experts is None or tp == 1 or sequence_parallel is True,
    lambda tp, cp, dp, ep, etp: tp * cp * dp % (ep * (tp if etp is None else etp)) == 0,
    lambda experts, lora: experts is None or lora is None,
    lambda experts, rule: experts is None or rule in ("adam", "lion", "ademamix"),
    lambda experts, tp: experts is None or tp <= 2,
    # Adapters
    lambda lora, style: lora is None or style not in LATENTS,
    lambda lora, sharding: lora is None or sharding != "optim_grads_params",
    lambda lora, rule: lora is None or rule not in MUON,
    lambda lora, depths: lora is None or depths == 0,
    # Where chunks end, by hand
    lambda split, depths: split == "even" or depths == 0,
    lambda split, memory: split == "even" or "stage" not in memory,
    lambda pp, virtual_stages, memory: "stage" not in memory or pp == 2,
    lambda experts, split: experts is None or split == "even",
    # Rules that make noise of a gradient that is zero but for rounding errors
    lambda rule, style: rule in ("adam", *MUON) or not (has_biases(style) or style == "sinks"),
    lambda rule, documents: rule in ("adam", *MUON) or documents is None,  # documents of one token have no attention to learn
    lambda rule, depths: rule in ("adam", *MUON) or depths < 3,  # nor has the last depth of few tokens
    lambda rule, tp: rule == "adam" or tp != 3,
    # Compiled layers
    lambda compiled, memory: not (compiled and ("norms" in memory or "mlp" in memory)),  # refused
    lambda compiled, loss_chunk: not compiled or loss_chunk > 0,  # the loss is not traced
]
"""Constraints of every case: it means something and is not refused. Each looks at the axes that its parameters name."""
QUICK: list[Callable[..., bool]] = [
    lambda compiled, tp, cp, pp, dp: not compiled or tp * cp * pp * dp <= 2,  # every rank traces its layers
    lambda compiled, sequence_parallel, schedule: not (compiled and sequence_parallel) or schedule in ("1f1b", "zb-h1"),
    lambda compiled, sequence_parallel, sharding: not (compiled and sequence_parallel) or sharding == "no_shard",
    lambda compiled, schedule, sharding: not compiled or schedule in ("1f1b", "zb-h1") or sharding == "no_shard",
    lambda compiled, fsdp_shard_size: not (compiled and fsdp_shard_size),
    lambda compiled, way: not (compiled and way),
    lambda compiled, pp_before_dp: not (compiled and pp_before_dp),
    lambda compiled, overlap_p2p: overlap_p2p or not compiled,
    lambda compiled, overlap: not (compiled and overlap),
    lambda compiled, style: not compiled or style in ("gpt2", "llama"),
    lambda compiled, experts: not (compiled and experts),
    lambda compiled, lora: not (compiled and lora),
    lambda compiled, depths: not (compiled and depths),
    lambda compiled, virtual_stages, split: not compiled or (virtual_stages < 3 and split == "even"),
    lambda compiled, attention: not compiled or attention == "auto",
]
"""Further constraints of a case of the normal run: layers are compiled in small worlds, without much else."""
LOOKED_AT = [dict.fromkeys(inspect.signature(constraint).parameters).keys() for constraint in [*CONSTRAINTS, *QUICK]]


def fits(case: Case) -> bool:
    """Whether a case may be run. Of one that is not whole, as far as it is known."""
    return all(constraint(*map(case.__getitem__, axes)) for constraint, axes in _within(frozenset(case))[0])


def is_quick(case: Case) -> bool:
    """Whether a case may be one of the normal run."""
    return fits(case) and all(constraint(*map(case.__getitem__, axes)) for constraint, axes in _within(frozenset(case))[1])


@functools.cache
def _within(known: frozenset[str]) -> list[list[tuple[Callable[..., bool], Iterable[str]]]]:
    """Return the constraints that look at known axes only, each with its axes: of every case, and of the normal run beside."""
    axes = iter(LOOKED_AT)
    return [[(one, looked_at) for one in part if known >= (looked_at := next(axes))] for part in (CONSTRAINTS, QUICK)]


def num_layers(case: Case) -> int:
    """One more than chunks, so that stages differ, or two for each chunk where its layers are treated otherwise."""
    chunks = case["pp"] * case["virtual_stages"]
    per_chunk = 2 if case["memory"] in ("full in groups of two", "the first of each chunk") or "one" in case["memory"] else 1
    fewest = 4 if case["experts"] or case["style"] in ATTENDING else 2
    return max(per_chunk * chunks + (case["pp"] > 1), fewest)


def shape_of(case: Case) -> ReferenceShape:
    """The model of a case."""
    like, parts = STYLES[case["style"]]
    layers, tp = num_layers(case), case["tp"]
    for field in ("windows", "unrotated"):
        if field in parts:
            parts = {**parts, field: tuple(itertools.islice(itertools.cycle(parts[field]), layers))}
    experts = None
    if case["experts"]:
        some = tuple(itertools.islice(itertools.cycle((False, True)), layers))
        experts = replace(KINDS[case["experts"]]((True,) * layers, some), micro_batch_size=case["micro_batch_size"])
    adapters: dict[str, Any] = {}
    if case["lora"]:
        adapters = {"lora_rank": 3, "lora_scale": 1.7, "lora_targets": tuple(case["lora"].split(","))}
    long = case["cp"] > 1 or "rope_scaling" in parts
    return like(
        **{
            "num_layers": layers,
            "hidden": 16,
            "ffn": 26 if tp <= 2 else 24,
            "heads": heads(tp),
            "kv_heads": kv_heads(tp, case["style"], case["grouped"]),
            "head_size": 4,
            "vocab": VOCAB,
            "seq": 6 if tp == 3 else 4 if experts and case["cp"] == 1 else 16 if long else 8,
            "tied": case["tied"],
            "experts": experts,
            "mtp_depths": case["depths"],
            "mtp_factor": 0.7,
            "z_loss": case["z_loss"],
            "smoothing": case["smoothing"],
            **adapters,
            **parts,
        }
    )


def documents(shape: ReferenceShape, steps: int, samples: int, *, has_padding: bool = False) -> list[Batch]:
    """Batches of samples in which documents end otherwise: nowhere, everywhere, at the edges, beside the places where ranks cut.

    With padding, samples end after all of their tokens, most of them, half, two, or all but the last label.
    """
    generator = torch.Generator().manual_seed(7)
    last = shape.seq - 1
    quarter = shape.seq // 4
    places: list[list[int]] = [[2], [], [0, quarter - 1, last], [quarter, 2 * quarter], list(range(shape.seq)), [2 * quarter - 1]]
    places += [[0], [1, 2, last - 1], [3 * quarter], [last]]
    batches = []
    for step in range(steps):
        window = torch.randint(EOD + 1, shape.vocab, (samples, shape.seq + 1), generator=generator)
        for sample in range(samples):
            window[sample, places[(sample + 3 * step) % len(places)]] = EOD  # a batch of one sample has tokens that count
        mask = torch.ones(samples, shape.seq, dtype=torch.float64)
        for sample in range(samples if has_padding else 0):
            length = (last, shape.seq + 1, shape.seq // 2 + 1, 2, shape.seq)[(sample + step) % 5]
            window[sample, length:], mask[sample, length - 1 :] = EOD, 0.0
        batches.append((window[:, :-1], window[:, 1:], mask))
    return batches


def steps_of(case: Case) -> int:
    """Return the number of steps. The second begins from what the first left behind; some rules warm up."""
    return 4 if case["rule"] == "ademamix" else 3 if "relative" in case["rule"] else 2


def recipe_of(case: Case, steps: int | None = None) -> Recipe:
    """Return the recipe of a case: what is trained, and how.

    Args:
        steps: number of steps; by default that of `steps_of`.
    """
    shape, micro = shape_of(case), case["micro_batch_size"]
    batch = case["microbatches"] * micro * case["dp"]
    steps = steps or steps_of(case)
    rules = None
    if case["documents"]:
        every = case["documents"] != "attention"
        rules = DocumentRules(EOD, every, True, every)
    has_padding = case["documents"] == "padded"
    batches = random_batches(shape, steps, batch, micro, seed=2)
    if rules:
        batches = documents(shape, steps, batch, has_padding=has_padding)
    optimizer, settings = RULES[case["rule"]]
    weights = build_random_weights(shape, seed=5, std=0.3 if shape.experts else 0.1)
    return Recipe(shape, weights, batches, rules=rules, has_padding=has_padding, optimizer=optimizer, update=settings)


def layout_of(case: Case) -> Layout:
    """Return the layout of a case."""
    schedule, virtual = case["schedule"], case["virtual_stages"]
    by_hand, late = case["split"] == "layout", SCHEDULES[schedule].splits_backward
    same: tuple[str, ...] = (
        "tp",
        "pp",
        "dp",
        "cp",
        "ep",
        "etp",
        "schedule",
        "sequence_parallel",
        "sharding",
        "overlap",
        "overlap_p2p",
    )
    same += ("overlap_param_gather", "pp_before_dp", "bucket_size", "fsdp_shard_size", "offload", "attention", "micro_batch_size")
    return Layout(
        **{axis: case[axis] for axis in same},
        **FSDP_WAYS[case["fsdp_way"]],
        dispatcher=case["dispatcher"] or "alltoall",
        ways=WAYS[case["way"]],
        virtual_stages=None if by_hand or chunks_of(schedule) == 1 else virtual,
        first_stage_layers=virtual if case["split"] == "first" else None,
        split=layout_string(case["pp"] * virtual, num_layers(case)) if by_hand else None,
        memory=replace(MEMORIES[case["memory"]], loss_chunk_tokens=case["loss_chunk"]),
        compiler=BlockCompiler("aot_eager", defers_weight_grads=bool(case["experts"]) and late) if case["compiled"] else None,
    )


def layout_string(num_chunks: int, layers: int) -> str:
    """Return a split by hand: the embedding alone, chunks of two layers until all are used, empty chunks, and the loss."""
    words = ["E"]
    for _ in range(num_chunks - 1):
        words.append("t" * min(2, layers))
        layers -= len(words[-1])
    words[0] += "t" * layers
    words[-1] += "L"
    return "|".join(words)


def reference_of(recipe: Recipe) -> ReferenceRun:
    """Train a recipe in one plain process. Documents are samples of their own where nothing joins them."""
    shape, loss = recipe.shape, mean_loss
    if recipe.rules is not None:
        rules = recipe.rules
        loss = functools.partial(
            loss_with_rules,
            rules=EodRules(EOD, rules.reset_position_ids, rules.reset_attention_mask, rules.eod_mask_loss),
            has_padding=recipe.has_padding,
        )
        joined = shape.experts or shape.mtp_depths or shape.z_loss or shape.smoothing or recipe.has_padding
        if rules.reset_position_ids and not joined:
            loss = functools.partial(loss_of_documents_apart, eod=EOD)
    return train(
        shape,
        recipe.weights,
        recipe.batches,
        loss=loss,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        optimizer=recipe.optimizer,
        numbers=build_rule_options(OptimizerConfig(**recipe.update), (shape.heads // shape.kv_heads, shape.head_size)),
    )


def refusals(case: Case) -> list[str]:
    """Return the messages of the rules between settings that refuse a case."""
    layout, shape = layout_of(case), shape_of(case)
    optimizer, settings = RULES[case["rule"]]
    recipe = Recipe(shape, {}, [], optimizer=optimizer, update=settings)
    training = TrainingConfig(
        micro_batch_size=layout.micro_batch_size,
        global_batch_size=layout.micro_batch_size * layout.dp * case["microbatches"],
        train_iters=2,
    )
    ways = tuple(itertools.islice(itertools.cycle(layout.ways), shape.num_layers))
    config = Config(
        model=model_config(shape),
        training=training,
        parallel=replace(parallel_config(layout), sequence_parallel=bool(layout.sequence_parallel), cp_comm_type=ways),
        optimizer=replace(optimizer_config(recipe, layout), lr=recipe.lr),
        memory=layout.memory,
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCAB),
    )
    return [violation.message for violation in find_violations(config, layout.world_size)]
