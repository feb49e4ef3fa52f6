"""A step waits for the device once, for its sums, and nowhere in the loop over microbatches: seen on the meta device as on CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.attention.documents import Documents, build_unpacked_documents
from megatron.config.config import Config
from megatron.memory.host_buffers import HostBufferPool
from megatron.model.inputs import ModelInputs
from megatron.moe.dispatch import Dispatcher
from megatron.parallel.context import connect_fake, disconnect
from megatron.parallel.random import DropoutKey
from megatron.parallel.sequence_split import split_zigzag
from megatron.parallel.topology import Topology
from megatron.training.step import TrainStep
from megatron_lab.audit.digests import DigestComparer
from megatron_lab.audit.sentinel import FirstMicrobatchGrads
from megatron_lab.planner.kernel_memory import CudaKernels
from tests.support.activation_runs import settings
from tests.support.host_waits import host_waits
from tests.support.planned import real_model

META = torch.device("meta")
MICROBATCHES = 2
SIZES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model"}
PIPELINE = {"pipeline_model_parallel_size": 2}
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"bf16": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "tensor and sequence parallel": {**LLAMA, "bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "1f1b, sharded, overlap": {
        **PIPELINE,
        "bf16": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "interleaved, recompute": {
        **PIPELINE,
        **LLAMA,
        "num_layers": 4,
        "num_virtual_stages_per_pipeline_rank": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "zb-v, fp16": {
        **PIPELINE,
        "fp16": True,
        "pipeline_schedule": "zb-v",
        "num_layers": 4,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "adafactor": {
        "bf16": True,
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "optimizer": "adafactor",
        "adafactor_beta1": 0.9,
        "adafactor_relative_step": True,
    },
    "moments in 8 bits": {
        "bf16": True,
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "optimizer": "adam8bit",
        "adam_8bit_block_size": 20,
    },
    "lamb": {"bf16": True, "optimizer": "lamb"},
    "muon": {
        "bf16": True,
        "log_max_attention_logit": True,
        "tensor_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "optimizer": "muon",
        "muon_use_nesterov": True,
    },
    "lion, ademamix": {
        "bf16": True,
        "optimizer": "lion",
        "param_groups": ("embedding.* optimizer=ademamix",),
        "ademamix_warmup_iters": 4,
    },
    "gradients sharded, z-loss, zeros": {
        "bf16": True,
        "data_parallel_sharding_strategy": "optim_grads",
        "z_loss_coeff": 1e-4,
        "log_num_zeros_in_grad": True,
    },
    "documents": {**LLAMA, "bf16": True, "reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},
    "documents in float32": {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},
    "selective recompute": {**LLAMA, "bf16": True, "recompute_granularity": "selective"},
    "activations in host memory": {**PIPELINE, **LLAMA, "num_layers": 4, "bf16": True, "cpu_offload_activations": True},
    "fp8": {**LLAMA, "bf16": True, "fp8_format": "hybrid", "fp8_recipe": "rowwise"},
    "fp8 in blocks": {
        **LLAMA,
        "bf16": True,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "fp8_format": "e4m3",
        "fp8_recipe": "blockwise",
    },
    "tensor overlap": {
        **LLAMA,
        "bf16": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": True,
    },
    "loss in chunks": {"bf16": True, "loss_chunk_tokens": 256},
    "groups, average, noise": {
        "bf16": True,
        "log_gradient_noise": True,
        "ema_decay": 0.9,
        "param_groups": ("*.mlp.* lr-mult=0.5 adam-beta1=0.8",),
    },
    "experts": {
        **LLAMA,
        "bf16": True,
        "num_experts": 4,
        "moe_layer_freq": "[0,1]",
        "expert_model_parallel_size": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
        "moe_input_jitter_eps": 0.1,
        "moe_expert_capacity_factor": 1.25,
        "moe_pad_expert_input_to_capacity": True,
        "moe_shared_expert_intermediate_size": 32,
        "use_distributed_optimizer": True,
    },
    "context ranks in three ways, noise": {
        **LLAMA,
        "bf16": True,
        "num_layers": 3,
        "context_parallel_size": 2,
        "cp_comm_type": ("all_gather", "p2p", "a2a"),
        "log_gradient_noise": True,
        "use_distributed_optimizer": True,
    },
}


def _topology(config: Config) -> Topology:
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return Topology(tp=tp, cp=cp, pp=parallel.pipeline_model_parallel_size, dp=2, ep=parallel.expert_model_parallel_size)


def _inputs(config: Config, number: int) -> ModelInputs:
    length, batch, ranks = config.tokens_per_rank, config.training.micro_batch_size, config.parallel.context_parallel_size
    ids = torch.zeros(length, batch, dtype=torch.int64, device=META)
    key = DropoutKey(1, 0, number) if config.model.hidden_dropout else None
    documents = None
    if config.data.reset_attention_mask:
        bounds = np.arange(0, length * batch + 1, length // 4, dtype=np.int32)
        documents = Documents(bounds, torch.zeros(len(bounds), dtype=torch.int32, device=META), batch)
    elif ranks > 1:
        documents = build_unpacked_documents(length * ranks, batch, split_zigzag(length * ranks, ranks), META)
    return ModelInputs(torch.zeros_like(ids), ids, ids, torch.ones(length, batch, device=META), key, documents)


def _waits(config: Config, rank: int) -> list[str]:
    topology = _topology(config)
    context = connect_fake(topology, rank)
    try:
        step = TrainStep.of(config, real_model(config, context), context, count_zeros=config.logging.log_num_zeros_in_grad)
        step.prepare(MICROBATCHES)
        batch = [_inputs(config, number) for number in range(MICROBATCHES)]
        with CudaKernels(), host_waits() as found:
            for iteration in (1, 2):
                found.append(f"step {iteration}")
                step.run(batch, iteration=iteration, learning_rate=1e-3, weight_decay=0.1)
        assert (step.executor.host.num_bytes > 0) == config.memory.cpu_offload_activations, "it does what the case is about"
        return found
    finally:
        disconnect()


class _Streams:
    """In place of a device's module: streams and events on which nothing runs."""

    Stream = Event = staticmethod(lambda *_: _Stream())
    current_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(lambda *_: contextlib.nullcontext())


class _Stream:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert name in ("wait_stream", "wait_event", "record_event"), f"the host would wait in {name}"
        return lambda *_: None


@pytest.fixture(autouse=True)
def meta_has_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Streams)
    monkeypatch.setattr(HostBufferPool, "allocate", lambda self, size: torch.empty(size, dtype=torch.uint8))


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_once(case: str) -> None:
    """On the first and on the last stage. (`fully_shard` and optimizer state in host memory do not run on the meta device.)"""
    changes = {"num_layers": 2, "global_batch_size": 2 * MICROBATCHES * 4, **CASES[case]}
    sizes = {axis: changes.get(f"{name}_parallel_size", 1) for axis, name in SIZES.items()}
    topology = Topology(**sizes, dp=2, ep=changes.get("expert_model_parallel_size", 1))
    config = settings(topology.world_size, **changes)
    assert _topology(config) == topology
    for rank in {0, topology.world_size - 1} if topology.pp > 1 else {0}:
        first, *one, second, other = _waits(config, rank)
        assert (first, second) == ("step 1", "step 2")
        assert len(one) == 1 and one[0].startswith("_to_copy to the host (training/step.py:") and "_reduce_totals" in one[0], one
        assert other == one[0]


@pytest.mark.parametrize("band", [None, 0.01])
def test_nobody_waits_for_digests_of_gradients(band: float | None) -> None:
    """Those of the sentinel are taken in the loop over microbatches. (Weights of a digest are copied to the device once.)"""
    config = settings(4, num_layers=2, global_batch_size=4 * MICROBATCHES, bf16=True, **PIPELINE)
    context = connect_fake(_topology(config), 0)
    try:
        step = TrainStep.of(config, real_model(config, context), context)
        step.prepare(MICROBATCHES)
        gradients, batch = (
            FirstMicrobatchGrads(step, DigestComparer(band)),
            [_inputs(config, number) for number in range(MICROBATCHES)],
        )
        for _ in range(2):
            gradients.start()
            with CudaKernels(), host_waits() as found:
                step.run(batch, iteration=1, learning_rate=1e-3, weight_decay=0.1)
            _, writes = gradients.stop()
        assert len(found) == 1 and "_reduce_totals" in found[0], found
        assert writes == [[(0, 0)]] * len(writes), "those of the first microbatch alone"
    finally:
        disconnect()


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("gathers", [False, True])
def test_a_layer_of_experts_waits_once_for_its_counts(ep: int, gathers: bool) -> None:
    """In its forward, where tokens have values; never in its backward, nor where it runs again."""
    context = connect_fake(Topology(dp=2, ep=ep), 0)
    try:
        dispatcher = dataclasses.replace(Dispatcher.of(context, 4, uses_allgather=gathers), assumed_imbalance=None)
        x, weights = torch.ones(6, 8, device=META, requires_grad=True), torch.ones(6, 2, device=META, requires_grad=True)
        chosen = torch.zeros(6, 2, dtype=torch.int64, device=META)
        with host_waits() as found:
            y, _ = dispatcher.run(x, weights, chosen, lambda rows, counts: 2 * rows, lambda: None)
            forward = len(found)
            y.sum().backward()
        assert len(found) == forward == 1 and "_to_copy to the host (moe/dispatch.py:" in found[0], found
    finally:
        disconnect()


PLANTED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense reads a value"),
    "bool": (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense reads a value"),
    "cpu": (lambda x: x.cpu(), "_to_copy to the host"),
    "copy to the host": (lambda x: torch.empty(4).copy_(x), "copy_ to the host"),
    "copy to the device": (lambda x: torch.ones(4).to(META), "_to_copy to the device"),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device=META), "tensor on the device"),
    "new_tensor": (lambda x: x.new_tensor([1.0]), "new_tensor on the device"),
    "write by a mask": (lambda x: x.__setitem__(x > 0, 0.0), "index_put_ by a mask"),
    "write by a list": (lambda x: x.__setitem__([0, 1], x[:2]), "a list as index"),
    "read by a list": (lambda x: x[[0, 1]], "a list as index"),
    "equal": (lambda x: torch.equal(x, x), "equal reads a value"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_what_waits_is_seen(fault: str) -> None:
    """Planted in a step's place. What has no form for the meta device ends there with an error by itself."""
    action, expected = PLANTED[fault]
    with host_waits() as found:
        action(torch.ones(4, device=META))
    assert found == [expected]
    for counts in (torch.nonzero, torch.unique, lambda x: x[x > 0], lambda x: x.repeat_interleave(x.long())):
        with pytest.raises((NotImplementedError, RuntimeError)), host_waits():
            counts(torch.ones(4, device=META))


def test_what_does_not_wait_is_left_alone() -> None:
    x = torch.ones(4, device=META)
    with host_waits() as found:
        torch.where(x > 0, 0.0, x)
        x.masked_fill(x > 0, 0.0).clamp(min=1.0)
        torch.full_like(x, 3.0) * torch.tensor(2.0)
        x[torch.zeros(2, dtype=torch.int64, device=META)]
        torch.ones(4).to(META, non_blocking=True)
    assert not found
