"""Compiled layers against the same layers as they are: bits, masks, what is kept for backward, and how often is compiled.

Whole runs at every layout are in test_layouts.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from megatron.attention.documents import Documents
from megatron.config.model import ModelConfig
from megatron.config.precision import CompileMode, PrecisionConfig
from megatron.model.build import Model, build_model
from megatron.model.compiled import BlockCompiler, CompiledBlock
from megatron.model.inputs import ModelInputs
from megatron.model.rope import build_rotary_table
from megatron.parallel.accumulate import deferring
from megatron.parallel.random import DropoutKey
from megatron.spec.layers import build_layer_specs
from megatron.tensor_parallel import linear
from megatron.tensor_parallel.layers import LinearLayer, VectorParamModule
from tests.support.lone_rank import lone_rank
from tests.support.sinks import sink_over

pytestmark = pytest.mark.usefixtures("compiles_before_forks")

SEQ, BATCH, VOCAB, HIDDEN = 32, 2, 32, 32
GPT = ModelConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    seq_length=SEQ,
    max_position_embeddings=SEQ,
    make_vocab_size_divisible_by=1,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
LLAMA = replace(
    GPT,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    group_query_attention=True,
    num_query_groups=2,
    disable_bias_linear=True,
)
EXPERTS = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=16, moe_aux_loss_coeff=0.1)
TRACED = BlockCompiler("aot_eager")
KEY = DropoutKey(seed=1, step=8, first_sample=12)


def model_of(config: ModelConfig, dtype: torch.dtype, compiler: BlockCompiler | None, **precision: Any) -> Model:
    settings: dict[str, Any] = {"compiler": compiler, "precision": PrecisionConfig(**precision)}
    return build_model(config, lone_rank(), dtype=dtype, vocab_size=VOCAB, sequence_parallel=False, seed=3, **settings)


def trained(
    config: ModelConfig,
    dtype: torch.dtype,
    compiler: BlockCompiler | None,
    *,
    key: DropoutKey | None = None,
    defer: bool = False,
    **precision: Any,
) -> list[torch.Tensor]:
    """The losses of two microbatches in two steps, and every gradient."""
    model, losses = model_of(config, dtype, compiler, **precision), []
    tokens = torch.randint(VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(1))
    positions, mask = torch.arange(SEQ).unsqueeze(1).expand(-1, BATCH), torch.ones(SEQ, BATCH, dtype=dtype)
    for step in range(2):
        mine = None if key is None else replace(key, step=step)
        loss = model.chunks[0](ModelInputs(positions, tokens, tokens, mask, mine))
        losses.append(loss.detach())
        if defer:
            with deferring() as put_off:
                loss.backward()
            assert len(put_off) == 4 * config.num_layers
            put_off.run()
        else:
            loss.backward()
    return [*losses, *(entry.param.grad for entry in model.params if entry.param.grad is not None)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    assert len(expected) > 2
    return len(found) == len(expected) and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


PARTLY_TURNED = replace(
    GPT, hidden_dropout=0.1, squared_relu=True, position_embedding_type="rope", rotary_percent=0.5, rotary_interleaved=True
)
CASES: dict[str, tuple[ModelConfig, torch.dtype, dict[str, Any]]] = {
    "dropout of attention, squared relu, half of the channels turned, in neighbours": (
        replace(PARTLY_TURNED, attention_dropout=0.1),
        torch.float64,
        {"key": KEY},
    ),
    "llama, late weight gradients": (replace(LLAMA, qk_layernorm=True), torch.bfloat16, {"defer": True}),
    "llama, 8 bits but for the ends": (
        replace(LLAMA, num_layers=3),
        torch.bfloat16,
        {"fp8_format": "hybrid", "first_last_layers_bf16": True},
    ),
    "experts between norms": (
        replace(EXPERTS, norm_placement="sandwich", hidden_dropout=0.1, moe_shared_expert_intermediate_size=16),
        torch.float64,
        {"key": KEY},
    ),
    "experts": (EXPERTS, torch.bfloat16, {}),
    "gpt, dropout of attention": (replace(GPT, hidden_dropout=0.1, attention_dropout=0.1), torch.float64, {"key": KEY}),
    "squared relu, half of the channels turned, in neighbours": (PARTLY_TURNED, torch.bfloat16, {"key": KEY}),
}
SINGLY = ("experts", "gpt, dropout of attention", "squared relu, half of the channels turned, in neighbours")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full("cases with these and more") if name in SINGLY else ()) for name in CASES],
)
def test_tracing_changes_no_bit_and_all_layers_share_it(name: str) -> None:
    """Dropout included, whose seeds differ in every step: nothing of a step is a part of the graph."""
    config, dtype, settings = CASES[name]
    torch.compiler.reset()
    counters.clear()
    assert same(trained(config, dtype, TRACED, **settings), trained(config, dtype, None, **settings))
    graphs = 2 if config.attention_dropout or (config.num_experts and config.hidden_dropout) else 1
    assert counters["stats"]["unique_graphs"] == graphs, "one compilation for all layers and steps"


def _a_seed_in_the_graph(patch: pytest.MonkeyPatch) -> None:
    """Masks of the first step in every step."""
    call, seen = CompiledBlock.__call__, dict[int, Any]()

    def baked(self: CompiledBlock, x: Any, rotary: Any, key: Any, documents: Any, seeds: Any) -> torch.Tensor:
        return call(self, x, rotary, key, documents, seen.setdefault(id(self), seeds))

    patch.setattr(CompiledBlock, "__call__", baked)


def _a_handle_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    """Backward gives a layer's gradients to the one before."""
    find, before = linear.LAYERS.find, dict[torch.Size, Any]()

    def wrong(handle: torch.Tensor) -> Any:
        found = find(handle)
        return before.setdefault(found.weight.shape, found)

    patch.setattr(linear.LAYERS, "find", wrong)


def _vectors_without_a_way_back(patch: pytest.MonkeyPatch) -> None:
    """Their gradients are dropped."""
    entering = VectorParamModule.get_vectors_for_forward

    def cut(self: VectorParamModule) -> Any:
        found = entering(self)
        return found if torch.compiler.is_compiling() else tuple(v if v is None else v.detach() for v in found)

    patch.setattr(VectorParamModule, "get_vectors_for_forward", cut)


@pytest.mark.parametrize("plant", [_a_seed_in_the_graph, _a_handle_of_another_layer, _vectors_without_a_way_back])
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(GPT, hidden_dropout=0.1)
    expected = trained(config, torch.float64, None, key=KEY)
    plant(monkeypatch)
    assert not same(trained(config, torch.float64, TRACED, key=KEY), expected)


def kept_bytes(config: ModelConfig, dtype: torch.dtype, compiler: BlockCompiler | None, documents: Documents | None) -> int:
    """Bytes that one layer keeps for backward beside its input, parameters and what layers share."""
    model = model_of(config, dtype, compiler)
    block = model.chunks[0].blocks[1]
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype).requires_grad_() * 1.0
    spec, positions = build_layer_specs(config)[1].attention.rotary, torch.arange(SEQ).unsqueeze(1).expand(-1, BATCH)
    rotary = None if spec is None else build_rotary_table(positions, spec, dtype)
    lives_anyway = [x, *([] if rotary is None else [rotary]), *(entry.param for entry in model.params)]
    shared = {tensor.untyped_storage()._cdata for tensor in lives_anyway}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x, rotary, None, documents)
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in found.items() if storage not in shared)


def test_a_compiled_layer_keeps_no_more(full: bool) -> None:
    """So a plan, which looks at layers as they are, is an upper bound. The normal run has each setting."""
    bounds = np.array([0, 5, SEQ, SEQ + 20, SEQ * BATCH], dtype=np.int32)
    packed = Documents(bounds, torch.from_numpy(bounds), BATCH)
    for packs, llama, narrow in itertools.product((0, 1), repeat=3):
        if full or packs != llama == narrow:
            config, dtype, documents = (GPT, LLAMA)[llama], (torch.float32, torch.bfloat16)[narrow], (None, packed)[packs]
            compiled, plain = (kept_bytes(config, dtype, compiler, documents) for compiler in (TRACED, None))
            assert 0 < compiled <= plain, f"{config.normalization}, {dtype}, {'documents' if documents else 'samples'}"


def test_generated_kernels_are_within_rounding() -> None:
    """In float32, with weight gradients that wait while later kernels run: nothing that they need is overwritten."""
    compiler = BlockCompiler("inductor", defers_weight_grads=True)
    # A model of few kernels: torch compiles each for a second.
    config = replace(GPT, normalization="RMSNorm", squared_relu=True, disable_bias_linear=True, parallel_residual=True)
    # Else the compiler first compiles and loads a program for each instruction set of the processor, to see if that works.
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        compiled = trained(config, torch.float32, compiler, defer=True)
    for found, wanted in zip(compiled, trained(config, torch.float32, None, defer=True), strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


class _Inputs:
    """A backend that runs graphs as they are, and notes the devices of their inputs."""

    def __init__(self) -> None:
        self.devices: list[set[str]] = []
        self._compile = aot_autograd(fw_compiler=self._note, bw_compiler=self._note, partition_fn=default_partition)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return self._compile(graph, inputs)

    def _note(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.devices.append({tensor.device.type for tensor in inputs if isinstance(tensor, torch.Tensor)})
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    "config",
    [
        replace(LLAMA, hidden_dropout=0.1, lora_rank=2),
        pytest.param(replace(GPT, hidden_dropout=0.1), marks=pytest.mark.full("llama, dropout, lora")),
        pytest.param(replace(LLAMA, lora_rank=2), marks=pytest.mark.full("llama, dropout, lora")),
    ],
    ids=["llama, dropout, lora", "gpt, dropout", "llama, lora"],
)
def test_all_inputs_of_a_graph_lie_on_the_device(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes an operation's outputs for unaligned if it has any input on the host. The meta device stands for a GPU."""
    meta, inputs = torch.device("meta"), _Inputs()
    torch.compiler.reset()
    compile_of = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_of(function, **{**options, "backend": inputs}))
    model = build_model(
        config,
        lone_rank(device=meta),
        dtype=torch.bfloat16,
        vocab_size=VOCAB,
        sequence_parallel=False,
        seed=3,
        should_materialize=False,
    )
    TRACED.compile_blocks(model.chunks[0].blocks, meta)
    block = model.chunks[0].blocks[0]
    for entry in model.params:
        entry.param.grad_sink = sink_over(torch.empty_like(entry.param))  # type: ignore[attr-defined]
    x = torch.empty(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16, device=meta, requires_grad=True)
    spec = build_layer_specs(config)[0].attention.rotary
    rotary = None if spec is None else build_rotary_table(torch.zeros(SEQ, BATCH, dtype=torch.int64, device=meta), spec, x.dtype)
    block(x, rotary, KEY if config.hidden_dropout else None).sum().backward()
    assert inputs.devices == [{"meta"}, {"meta"}], "forward and backward"


def test_a_copied_layer_has_a_handle_of_its_own() -> None:
    """Otherwise the copy's gradients would go to the original's parameters."""
    compiled, plain = (model_of(GPT, torch.float32, compiler).chunks[0].blocks[0].mlp.down for compiler in (TRACED, None))
    copied, plain_copy = copy.deepcopy(compiled), copy.deepcopy(plain)
    for layer in (compiled, copied):
        assert isinstance(layer, LinearLayer) and layer.handle is not None
        assert linear.LAYERS.find(layer.handle) is layer
    assert isinstance(plain_copy, LinearLayer) and plain_copy.handle is None


def test_cuda_graphs_are_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options["options"]))
    for mode in get_args(CompileMode):
        BlockCompiler(mode=mode).compile_function(print)
    assert [options["triton.cudagraphs"] for options in given] == [False] * 4
