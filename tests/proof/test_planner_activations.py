"""The parts of the plan of activations: storages, layers that are repeated, kernels of CUDA, messages, inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.attention.backends import backend_in_use, select_kernel
from megatron.config.parallel import CpCommType
from megatron.model.inputs import ModelInputs
from megatron.moe import grouped
from megatron.pipeline_parallel.exchange import plan_receives
from megatron.spec.attention_backends import AttentionCall
from megatron.spec.operations import OpType
from megatron.spec.schedules import build_schedule
from megatron_lab.planner import chunk_trace, cpu_kernels, op_cache, storages
from megatron_lab.planner.context_cost import count_attention_traffic, count_max_buffer_bytes
from megatron_lab.planner.peak import iter_message_counts
from megatron_lab.planner.storages import MemorySpan, StorageLedger
from tests.proof.test_planner_activations_measured import (
    DEEPSEEK,
    DROPOUT,
    EIGHT_BITS_WITHIN,
    FULL,
    LLAMA,
    OFFLOAD,
    PACKED,
    PP2,
    TP2,
    selective,
)
from tests.support.activation_runs import build_step, plan_rank, settings
from tests.support.covering import full_but
from tests.support.mixed_layers import mix_layers
from tests.support.warm import run_forked_ranks

CHANGES: list[dict[str, Any]] = [
    {"bf16": True, **DROPOUT},
    {"bf16": True, **EIGHT_BITS_WITHIN, **LLAMA},
    {"pipeline_schedule": "zb-h1", "sequence_parallel": True, **LLAMA},
    {"bf16": True, **OFFLOAD, **LLAMA},
    {"pipeline_schedule": "zb-h1", **FULL, "cpu_offloading_num_layers": 4},
]


def test_storages_are_counted_once_and_until_their_end() -> None:
    """A view costs nothing; what is let go leaves; the peak is what was alive at once."""
    with StorageLedger() as ledger:
        kept = torch.empty(100, device="meta")
        ledger.take_span()
        views = [kept.view(10, 10).t(), kept[3:]]
        passing = kept + 1
        del passing
        made = kept * 2
        span = ledger.take_span()
        assert (span.net_bytes, span.peak_bytes) == (400, 400)
        del made, kept
        assert ledger.take_span().net_bytes == -400, "the views still hold the first"
        views.clear()
        assert ledger.take_span().net_bytes == -400


def test_a_sum_of_gradients_is_made_in_place_where_nobody_else_holds_the_first() -> None:
    """Autograd does so, but not under a mode: the ledger knows."""
    for held, peak in ((False, 0), (True, 400)):
        with torch.no_grad(), StorageLedger() as ledger:
            first, second = torch.empty(100, device="meta"), torch.empty(100, device="meta")
            holder = first if held else None
            ledger.take_span()
            total = first + second
            del first, second
            assert ledger.take_span().peak_bytes == peak
            del total, holder


@pytest.mark.parametrize(
    ("changes", "device_type"),
    full_but(
        [(CHANGES[0], "cpu"), (CHANGES[1], "cuda"), (CHANGES[3], "cuda"), (CHANGES[4], "cpu")],
        [(changes, device_type) for changes in CHANGES for device_type in ("cpu", "cuda")],
        "cases that are kept have these settings, and recompute, offloading or 8 bits beside",
    ),
)
def test_repeated_layers_are_as_all_layers_run(changes: dict[str, Any], device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and collectives of every operation, to the last byte; and nothing is left when all have run."""
    stand, few = chunk_trace.choose_representatives, list[bool]()

    def noted(specs: Sequence[Hashable]) -> list[int]:
        found = stand(specs)
        few.append(len(set(found)) < len(found))
        return found

    monkeypatch.setattr(chunk_trace, "choose_representatives", noted)
    # Of those that move to the host the first and the last are of kinds of their own.
    num_layers = 20 if "cpu_offloading_num_layers" in changes else 14 if changes.items() >= OFFLOAD.items() else 10
    config = settings(4, num_layers=num_layers, **PP2, **TP2, **changes)
    repeated = [plan_rank(config, 4, rank, device_type=device_type).traces for rank in (0, 3)]
    traces = [one for traces in repeated for trace in traces.values() for one in (trace, trace.immediate_trace) if one is not None]
    assert len(traces) == 2 + 2 * config.memory.has_offload
    assert all(
        sum(op.net_bytes for op in one.ops.values()) + sum(one.fetched_bytes.values()) == one.leaving_bytes for one in traces
    )
    assert any(few), "all layers have run"
    monkeypatch.setattr(chunk_trace, "choose_representatives", lambda specs: list(range(len(specs))))
    assert [plan_rank(config, 4, rank, device_type=device_type).traces for rank in (0, 3)] == repeated


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sequence_parallel": True}, marks=pytest.mark.full("the same at zb-h1, and repeated layers")),
        {"pipeline_schedule": "zb-h1"},
    ],
)
def test_layers_that_differ_are_as_all_layers_run(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third layer has no rotary positions and a wider MLP: to the last byte; and it is not what equal layers give."""
    config = settings(4, num_layers=24, **PP2, **TP2, **LLAMA, **changes)  # three of the twelve of a stage are not run
    alike = [plan_rank(config, 4, rank, device_type="cuda").traces for rank in (0, 3)]
    mix_layers(monkeypatch, 3)
    few = [plan_rank(config, 4, rank, device_type="cuda").traces for rank in (0, 3)]
    assert few != alike
    monkeypatch.setattr(chunk_trace, "choose_representatives", lambda specs: list(range(len(specs))))
    assert [plan_rank(config, 4, rank, device_type="cuda").traces for rank in (0, 3)] == few


@pytest.mark.parametrize("device_type", [pytest.param("cpu", marks=pytest.mark.full("the same for CUDA")), "cuda"])
def test_a_loss_in_chunks_is_as_all_chunks_run(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many chunks three are run: bytes, operations and collectives are those of all of them, to the last."""
    every = {"z_loss_coeff": 1e-4, "label_smoothing": 0.1, "final_logit_softcapping": 30.0, "vocab_size": 501}
    counted: list[int] = []
    repeated = StorageLedger.repeat

    def note(ledger: StorageLedger, times: int) -> contextlib.AbstractContextManager[None]:
        counted.append(times)
        return repeated(ledger, times)

    monkeypatch.setattr(StorageLedger, "repeat", note)
    all_settings = {"bf16": True, "sequence_parallel": True, **TP2, **LLAMA, **every}
    depths = {"bf16": True, "mtp_num_layers": 2}
    cases: list[tuple[dict[str, Any], int]] = [({}, 3), ({}, 4), ({}, 7), (all_settings, 4), (all_settings, 13), (depths, 5)]
    for changes, chunks in cases:  # of 256 x 4 tokens; the last of 7 and of 13 is smaller
        config = settings(2, num_layers=1, loss_chunk_tokens=-(-1024 // chunks), **changes)
        counted.clear()
        few = plan_rank(config, 2, device_type=device_type).traces
        assert set(counted) == ({chunks - 2} if chunks > 3 else set())
        with monkeypatch.context() as whole:
            whole.setattr(chunk_trace, "sample_iterations", lambda repeats: contextlib.nullcontext())
            assert plan_rank(config, 2, device_type=device_type).traces == few, (changes, chunks)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_operations_that_ran_before_give_what_they_gave(device_type: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one plan, and all of them in the next: to the byte and the operation as if each ran again. For CUDA operations in place
    and views do run again."""
    longer = {"bf16": True, "context_parallel_size": 2, "z_loss_coeff": 1e-4, **LLAMA}
    known = op_cache if device_type == "cuda" else cpu_kernels
    for changes in (*(CHANGES[:3] if full else CHANGES[:1]), longer):
        config = settings(8, num_layers=4, **PP2, **{**TP2, **changes})
        monkeypatch.setattr(known, "_cache", {})
        first, again = (plan_rank(config, 8, 7, device_type=device_type).traces for _ in range(2))
        names = {func.name() for func, *_ in known._cache}
        assert "aten::mul.Tensor" in names
        assert (names & {"aten::mul_.Tensor", "aten::view", "aten::_unsafe_view"} == set()) == (device_type == "cuda")
        with monkeypatch.context() as each:
            each.setattr(storages, "run_op", lambda func, args, kwargs: func(*args, **kwargs))
            each.setattr(cpu_kernels.CpuKernels, "__torch_dispatch__", FakeTensorMode.__torch_dispatch__)
            assert plan_rank(config, 8, 7, device_type=device_type).traces == first == again


@pytest.mark.parametrize(("tensor_size", "sequence_parallel", "factor"), [(1, False, 34), (2, False, 22), (2, True, 17)])
def test_a_layer_keeps_what_korthikanti_et_al_count(tensor_size: int, sequence_parallel: bool, factor: int) -> None:
    """With 16 bits and dropout: sbh x 34 on one rank, 10 + 24/t on t, 34/t with sequence parallelism (2022, equations 1, 2 and 4,
    without the scores, which flash attention does not keep). Beside that statistics: two numbers a row of each norm, and one of
    each row of attention."""
    world = 2
    changes = {"bf16": True, "hidden_size": 128, **DROPOUT, "sequence_parallel": sequence_parallel}
    changes["tensor_model_parallel_size"] = tensor_size
    four, five = (
        plan_rank(settings(world, num_layers=layers, **changes), world, device_type="cuda").traces[0].ops[OpType.FORWARD].net_bytes
        for layers in (4, 5)
    )
    rows, heads = 256 * 4, 4
    norms = 2 * 2 * 4 * rows // (tensor_size if sequence_parallel else 1)
    attention = 4 * rows * heads // tensor_size
    seeds = five - four - factor * rows * 128 - norms - attention
    assert 0 <= seeds <= 64


def test_grouped_weight_gradients_take_their_temporary_and_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is the bfloat16 gradients of one group of experts beside the float32 ones, and the ends of their rows."""
    experts, width = 16, 128
    changes = {"num_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": width, "hidden_size": width}
    config = settings(1, **{**LLAMA, "bf16": True, "pipeline_schedule": "zb-h1", "num_layers": 2, **changes})

    def planned() -> MemorySpan:
        return plan_rank(config, 1, device_type="cuda").traces[0].ops[OpType.WEIGHT_GRAD]

    whole, ends = experts * width * width * 2, 4 * experts
    grouped_span = planned()
    assert grouped_span.peak_bytes == whole + ends, "of the down projections; the up projections have freed more by then"
    monkeypatch.setattr(grouped, "MAX_GROUPED_GRAD_BYTES", whole // 2)
    halves = planned()
    assert halves.peak_bytes == whole // 2 + ends
    monkeypatch.setattr(grouped, "compute_experts_per_kernel", lambda *_: 0)
    loop = planned()
    assert loop.peak_bytes == 0
    launches = [span.work.num_kernels for span in (grouped_span, halves, loop)]
    attention = 4  # matrices of a layer's attention, each of one launch: 2 layers
    assert launches == [attention + 4 * 3, attention + 2 * (1 + 2 * 2) + 2 * (1 + 4 * 2), attention + 4 * experts]
    assert grouped_span.work.flops == halves.work.flops == loop.work.flops


@pytest.mark.parametrize("device_type", [pytest.param("cpu", marks=pytest.mark.full("the same for CUDA")), "cuda"])
def test_context_ranks_keep_their_share_of_a_layer(device_type: str) -> None:
    """Of what one rank would keep between forward and backward, each of C ranks keeps 1/C within 3 %; and what comes and goes is no
    more than that with the buffers that the plan names."""
    changes = {**LLAMA, "bf16": True, "hidden_size": 128, "seq_length": 512, "vocab_size": 128, "attention_dropout": 0.0}
    alone = plan_rank(settings(1, **changes), 1, device_type=device_type).traces[0].ops
    for ranks, way in ((2, "all_gather"), (4, "p2p")):
        config = settings(ranks, context_parallel_size=ranks, cp_comm_type=(way,), **changes)
        for rank in (0, ranks - 1):
            shared = plan_rank(config, ranks, rank, device_type=device_type).traces[0].ops
            assert shared[OpType.FORWARD].net_bytes * ranks == pytest.approx(alone[OpType.FORWARD].net_bytes, rel=0.03)
            most = alone[OpType.BACKWARD].peak_bytes / ranks + count_max_buffer_bytes(config, 2)
            assert shared[OpType.BACKWARD].peak_bytes <= 1.03 * most or device_type == "cpu", (way, rank)


GROUPED = {**LLAMA, "num_query_groups": 4}


@pytest.mark.parametrize(
    ("style", "way"),
    [
        *(pytest.param(DEEPSEEK, way, id=f"latents-{way}") for way in get_args(CpCommType)),
        pytest.param(GROUPED, "a2a", id="grouped-a2a"),
        *(
            pytest.param(GROUPED, way, marks=pytest.mark.full("latents, and grouped heads that are exchanged"), id=f"grouped-{way}")
            for way in get_args(CpCommType)
            if way != "a2a"
        ),
    ],
)
def test_the_formula_of_what_context_ranks_send(way: CpCommType, style: dict[str, Any]) -> None:
    changes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "cp_comm_type": (way,)}
    config = settings(4, **{**style, "bf16": True, "num_layers": 2, "seq_length": 64, **changes})
    planned = plan_rank(config, 4).transfers
    (count,) = {16 // config.training.micro_batch_size}
    assert sum(one.bytes for one in planned if one.group == "cp") == count * count_attention_traffic(config, 2)


def test_what_each_part_frees_that_is_computed_again() -> None:
    """In numbers a token, of widths h and f: two norms' results; the activation's; with the MLP its two first results, a norm's and
    the statistics of that; and what attention keeps for each pair of tokens, where it is computed by plain products."""
    h, tokens, heads = 64, 256 * 4, 4

    @functools.cache
    def kept(device_type: str, modules: tuple[str, ...], **changes: Any) -> int:
        ranks = changes.get("context_parallel_size", 1)
        config = settings(ranks, num_layers=1, **changes, **(selective(*modules) if modules else {}))
        return plan_rank(config, ranks, device_type=device_type).traces[0].ops[OpType.FORWARD].net_bytes

    def freed(device_type: str, *modules: str, **changes: Any) -> float:
        all_kept, rest = (kept(device_type, again, **changes) for again in ((), modules))
        return (all_kept - rest) / tokens / (2 if changes.get("bf16") else 4)

    gpt, llama = {"bf16": True, "squared_relu": True}, {"bf16": True, **LLAMA}
    assert freed("cpu", "layernorm", **llama) == freed("cuda", "layernorm", **gpt) == 2 * h
    assert freed("cpu", "layernorm", "mlp_act", **gpt) == 2 * h + 256
    assert freed("cuda", "layernorm", "mlp_act", **llama) == 2 * h + 128
    assert freed("cuda", "mlp", **gpt) == 2 * 256 + h + 2 * 2
    assert freed("cuda", "mlp", **llama) == 3 * 128 + h + 2
    assert freed("cuda", "core_attn", **llama) == freed("cpu", "core_attn", **llama) == 0
    assert freed("cuda", "core_attn", **LLAMA) > heads * 256 - h, "less what is kept to compute them again"
    assert freed("cpu", "core_attn", attention_dropout=0.1) > 3 * heads * 256
    by_heads = {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}
    assert freed("cuda", "core_attn", **LLAMA, **by_heads) > heads / 2 * 256 - h, "half of the heads"


@pytest.mark.parametrize(
    ("dtype", "head_size", "grouped", "kernel"),
    [
        (torch.bfloat16, 128, True, "flash"),
        (torch.float16, 80, False, "flash"),
        (torch.bfloat16, 288, False, "efficient"),
        (torch.float32, 128, False, "efficient"),
        (torch.float32, 128, True, "math"),
        (torch.float32, 30, False, "math"),
        (torch.float64, 128, False, "math"),
    ],
)
def test_the_kernel_that_cuda_takes(dtype: torch.dtype, head_size: int, grouped: bool, kernel: str) -> None:
    """By the conditions of torch."""
    call = AttentionCall(8 * dtype.itemsize, head_size, grouped, is_on_cuda=True)
    assert select_kernel(call) == kernel
    for chosen in {kernel, "math"}:
        with backend_in_use(chosen):  # type: ignore[arg-type]
            assert select_kernel(call) == chosen
    assert select_kernel(call) == kernel, "as before"


@pytest.mark.parametrize(
    ("device_type", "changes", "words"),
    [
        ("cuda", {"bf16": True, **DROPOUT}, "flash attention"),
        ("cuda", {"bf16": True, **PACKED, **LLAMA}, "flash attention over documents or in windows"),
        ("cuda", {"bf16": True, **PACKED, **DROPOUT}, "flash attention"),
        ("cuda", {"bf16": True, "window_size": "100,0", **LLAMA}, "flash attention over documents or in windows"),
        ("cuda", {"bf16": True, "window_size": "100,0", "softmax_type": "learnable"}, "products block by block"),
        ("cpu", {"window_size": "100,0", **DROPOUT}, "products block by block"),
        ("cuda", {}, "memory-efficient attention"),
        ("cuda", {"bf16": True, **LLAMA, "attention_backend": "fused"}, "cuDNN's attention"),
        ("cuda", {"bf16": True, "attention_backend": "efficient"}, "memory-efficient attention"),
        (
            "cuda",
            {"bf16": True, **PACKED, **LLAMA, "attention_backend": "math"},
            "attention by plain products, which keeps its probabilities",
        ),
        ("cpu", {"attention_backend": "math"}, "attention by plain products, which keeps its probabilities"),
        ("cuda", LLAMA, "attention by plain products, which keeps its probabilities"),
        ("cpu", {"bf16": True}, "the CPU's flash attention"),
        ("cpu", DROPOUT, "attention by plain products, which keeps its probabilities"),
    ],
)
def test_a_plan_says_which_attention_it_assumes(device_type: str, changes: dict[str, Any], words: str) -> None:
    """And only attention that keeps probabilities grows with the square of the sequence."""
    found = [
        plan_rank(settings(1, num_layers=1, seq_length=length, **changes), 1, device_type=device_type) for length in (256, 512)
    ]
    assert [one.traces[0].attention_kernel for one in found] == [words] * 2
    short, long = (one.traces[0].ops[OpType.FORWARD].net_bytes for one in found)
    assert (long > 2.5 * short) == ("probabilities" in words)


def test_the_memory_of_a_step_is_the_same_whichever_kernel_is_measured_to_be_faster() -> None:
    """So a plan need not know the measurement, which takes the device. They differ by 16 bytes a layer, for the dropout's seed."""
    for changes in ({"bf16": True}, {"bf16": True, **LLAMA}):
        traces = [
            plan_rank(settings(1, **changes, attention_backend=backend), 1, device_type="cuda").traces[0]
            for backend in ("auto", "cudnn")
        ]
        assert [trace.attention_kernel for trace in traces] == ["flash attention", "cuDNN's attention"]
        flash, cudnn = (trace.ops for trace in traces)
        for kind, span in flash.items():
            assert span.peak_bytes == pytest.approx(cudnn[kind].peak_bytes, abs=64) and span.net_bytes == pytest.approx(
                cudnn[kind].net_bytes, abs=64
            )


def test_on_cuda_fused_operations_keep_less_than_their_parts() -> None:
    """RMSNorm its input and a number a row, dropout a byte an element; the CPU runs their parts, which keep more."""
    for changes in ({"normalization": "RMSNorm"}, {"hidden_dropout": 0.1}):
        cpu, cuda = (
            plan_rank(settings(1, **changes), 1, device_type=device).traces[0].ops[OpType.FORWARD].net_bytes
            for device in ("cpu", "cuda")
        )
        assert cuda < 0.95 * cpu


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v", "interleaved"])
def test_all_messages_leave(name: str) -> None:
    """At the end of a step only buffers are left, and what left last; what leaves early is never more than what leaves late."""
    schedule = build_schedule(name, 4, 8, 2 if name in ("zb-v", "interleaved") else 1)
    for stage, plan in enumerate(plan_receives(schedule)):
        early, late = (
            list(iter_message_counts(schedule, stage, plan, overlap=True, detects_completion=notices)) for notices in (True, False)
        )
        assert all(a <= b for some, others in zip(early, late, strict=True) for a, b in zip(some, others, strict=True))
        unread, most, stage_of = 0, 0, schedule.stage_of_chunk
        for (kind, chunk, _), posted in zip(schedule.ops[stage], plan.posts, strict=True):
            unread += len(posted)
            most = max(most, unread)
            if kind in (OpType.BACKWARD, OpType.WEIGHT_GRAD):
                unread -= sum(0 <= near <= schedule.num_chunks - 1 and stage_of[near] != stage for near in (chunk - 1, chunk + 1))
        assert unread == 0 < most
        assert early[-1][1] - most in (0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, marks=pytest.mark.full("the two cases with more inputs")) for changes in ({}, PACKED)),
        {"reset_position_ids": True},
        {**PACKED, **DROPOUT},
    ],
    ids=str,
)
def test_inputs_take_what_they_take(changes: dict[str, Any]) -> None:
    """On every stage, after a step, but for the few numbers that say where documents lie."""
    config = settings(3, num_layers=3, pipeline_model_parallel_size=3, hidden_size=32, seq_length=128, **changes)

    def tensors(inputs: ModelInputs) -> list[torch.Tensor]:
        found = [inputs.positions, inputs.tokens, inputs.labels, inputs.loss_mask]
        if inputs.documents is not None:
            found += inputs.documents.sorted_by_length[:2]
        return [tensor for tensor in found if tensor is not None]

    def rank_run(rank: int) -> int:
        step, batch = build_step(config, 3, rank)
        step.compute_gradients(batch)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for inputs in batch for t in tensors(inputs)}
        return sum(storages.values())

    for rank, found in enumerate(run_forked_ranks(3, rank_run)):
        assert plan_rank(config, 3, rank).activations.input_bytes == found


def test_a_step_moves_to_the_host_what_each_microbatch_saves() -> None:
    """Under 1F1B on two stages: of the last stage's layers the last never moves. GPipe moves all, but for what comes back soon."""
    config = settings(2, num_layers=4, global_batch_size=24, **OFFLOAD, **PP2, **LLAMA)
    first, last = (plan_rank(config, 2, rank) for rank in range(2))
    (trace,) = last.traces.values()
    assert (
        trace.immediate_trace is not None
        and trace.immediate_trace.offloaded_sizes[:-1] == trace.offloaded_sizes[:-1]
        and trace.immediate_trace.offloaded_sizes[-1] == ()
    )
    assert last.activations.offloaded_bytes == 6 * sum(map(sum, trace.immediate_trace.offloaded_sizes))
    (trace,) = first.traces.values()
    assert trace.immediate_trace is not None
    # F F B F B ...: the first microbatch comes back after one other operation, and the last one's backward after one other too.
    assert first.activations.offloaded_bytes == 6 * sum(map(sum, trace.offloaded_sizes)) - 2 * sum(trace.offloaded_sizes[-1])
    everything = settings(1, num_layers=3, pipeline_schedule="gpipe", global_batch_size=24, **OFFLOAD, **LLAMA)
    alone = plan_rank(everything, 1)
    (trace,) = alone.traces.values()
    assert alone.activations.offloaded_bytes == 6 * sum(map(sum, trace.offloaded_sizes))


@pytest.mark.full("tests/proof/test_planner_activations_measured.py: depths that run again, and that move to the host")
def test_depths_keep_less_where_layers_do() -> None:
    """One more of them, run again or moved to host memory."""
    base = {"num_layers": 1, "loss_chunk_tokens": 64}

    def of_one(**memory: Any) -> int:
        first, second = (plan_rank(settings(1, mtp_num_layers=k, **base, **memory), 1, 0).beside_inputs for k in (1, 2))
        return second - first

    kept = of_one()
    assert 4 * of_one(**FULL) < kept and 4 * of_one(**OFFLOAD) < kept
