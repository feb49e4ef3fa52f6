"""Each check of a GPU fails on a planted fault and passes without one. On the CPU, with stand-ins for kernels of CUDA."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.attention import core, documents, flash_range_pairs
from megatron.moe import grouped
from megatron.parallel import matmul
from megatron.precision.fp8_gemms import Fp8Gemms
from megatron.spec.counts import count_attention_flops, count_flops_per_token, count_parameters
from megatron.tensor_parallel import cross_entropy
from megatron_lab.benchmarks import single
from megatron_lab.benchmarks.plain_models import build_plain_model
from megatron_lab.benchmarks.shapes import SHAPES
from megatron_lab.gpu import kernels, profiles, speed, steps, trace
from megatron_lab.gpu.context import CheckContext, CheckFailed, DoesNotFit, Outcome, require_at_most
from megatron_lab.gpu.profile_text import shorten_kernel_name
from megatron_lab.gpu.scripts import rank
from megatron_lab.gpu.worker import run_check
from tests.support import flash_attention


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckContext:
    """On the CPU, with smaller models, and as few steps as there may be."""
    monkeypatch.setattr(speed, "_MAX_TIMED_S", 0.0)
    monkeypatch.setattr(speed, "_WARM_UP_STEPS", 1)
    for name in speed._CPU_SHAPES.values():
        monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], layers=1, hidden=64, seq=32, vocab=256))
    return CheckContext("cpu", tmp_path)


def _plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make one function of the framework wrong."""
    if fault == "weight-gradients":
        whole = matmul.compute_weight_product
        monkeypatch.setattr(matmul, "compute_weight_product", lambda grad, x, into, add: whole(grad[1:], x[1:], into, add=add))
    elif fault == "experts":
        monkeypatch.setattr(grouped, "_matmul_per_expert", _one_off(grouped._matmul_per_expert))
    elif fault == "cross-entropy":
        monkeypatch.setattr(cross_entropy, "_mask_padding", lambda logits, columns: None)
    elif fault == "deterministic-counts":
        adds = matmul.add_rows
        monkeypatch.setattr(matmul, "add_rows", lambda into, ids, rows: adds(into, ids.clamp(max=400), rows))


def _one_off(function: Any) -> Any:
    """Products of rows with the matrix of the expert before theirs, in bfloat16."""

    def wrong(x: torch.Tensor, weight: torch.Tensor, counts: Any, **options: Any) -> torch.Tensor:
        return function(x, weight.roll(1, 0) if x.dtype == torch.bfloat16 else weight, counts, **options)

    return wrong


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("name", ["weight-gradients", "experts", "cross-entropy", "deterministic-counts"])
def test_kernel_checks(name: str, planted: bool, context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"weight-gradients": kernels.weight_gradients, "experts": kernels.experts, "cross-entropy": kernels.cross_entropy}
    functions["deterministic-counts"] = kernels.deterministic_counts
    if not planted:
        assert functions[name](context).figure
        return
    _plant(monkeypatch, name)
    with pytest.raises(CheckFailed):
        functions[name](context)


def test_attention_that_is_wrong_in_16_bits_is_found(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is wrong, the reference is not."""
    assert "math" in kernels.attention(context).figure
    right = torch.nn.functional.scaled_dot_product_attention

    def wrong(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(q, *args, **options) * (1.05 if q.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(core.F, "scaled_dot_product_attention", wrong)
    with pytest.raises(CheckFailed, match="wrong: math"):
        kernels.attention(context)


def test_an_error_of_one_kernel_does_not_hide_the_others(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention, and of the recipes of 8 bits."""
    right = torch.nn.functional.scaled_dot_product_attention

    def raises(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if q.dtype == torch.bfloat16 and q.shape[-1] == 128:
            raise RuntimeError("cuDNN Frontend error: no plan")
        return right(q, *args, **options)

    monkeypatch.setattr(core.F, "scaled_dot_product_attention", raises)
    with pytest.raises(CheckFailed, match="math failed at s=320 r=1 d=128: RuntimeError: cuDNN Frontend error: no plan"):
        kernels.attention(context)

    class Broken(Fp8Gemms):
        def compute_weight_grad(self, *args: Any, **options: Any) -> None:
            if self._token_granularity == "row":
                raise ValueError("Only bf16 high precision output types are supported")
            super().compute_weight_grad(*args, **options)

    monkeypatch.setattr("megatron.precision.fp8_gemms.Fp8Gemms", Broken)
    with pytest.raises(CheckFailed, match=r"rowwise e4m3: ValueError: Only bf16.*tensorwise e4m3: \d"):
        kernels.fp8_products(context)


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted"])
def test_attention_of_two_runs(planted: bool, context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the kernels of CUDA. A planted fault takes the log-sums of another run."""
    monkeypatch.setattr(flash_range_pairs, "varlen_forward", flash_attention.plain_forward)
    monkeypatch.setattr(flash_range_pairs, "varlen_backward", flash_attention.plain_backward)
    if not planted:
        assert "at most" in kernels.flash_parts(context).figure
        return

    def wrong(*args: Any) -> Any:
        grad, q, k, v, out, sums, *rest = args
        return flash_attention.plain_backward(grad, q, k, v, out, sums + 0.1, *rest)

    monkeypatch.setattr(flash_range_pairs, "varlen_backward", wrong)
    with pytest.raises(CheckFailed):
        kernels.flash_parts(context)


def test_attention_within_documents(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products block by block in place of the kernel of CUDA; a kernel that leaves documents is found."""
    from megatron.attention.blocks import BlockAttentionOptions, CausalMask, block_attention
    from megatron.attention.documents import Documents
    from megatron.spec.layers import ScoreSpec

    def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, longest: int, *, window: int | None) -> Any:
        inside = Documents(bounds.numpy(), bounds, q.shape[1])
        return block_attention(
            q.unflatten(2, (k.shape[2], -1)),
            k,
            v,
            None,
            BlockAttentionOptions(ScoreSpec(window=window), CausalMask(window, inside)),
        )

    monkeypatch.setattr(documents, "flash_attention", stand_in)
    assert "at most" in kernels.varlen(context).figure

    def leaves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, longest: int, *, window: int | None) -> Any:
        return stand_in(q, k, v, bounds[[0, 3, 6]], longest, window=window)

    monkeypatch.setattr(documents, "flash_attention", leaves)
    with pytest.raises(CheckFailed):
        kernels.varlen(context)


def test_a_value_that_is_no_number_fails() -> None:
    with pytest.raises(CheckFailed, match="nan"):
        require_at_most(float("nan"), 1.0, "error")
    assert max([0.1, float("nan"), 0.2], key=kernels._nan_last) != 0.2


def test_a_step_that_differs_from_the_cpu_is_found(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at most" in steps.same_as_cpu(context, "latent").figure
    factors, right = iter((1.0, 1.0001)), steps.build_train_step

    @contextlib.contextmanager
    def with_other_weights(*args: Any) -> Iterator[Any]:
        factor = next(factors)
        with right(*args) as step:
            with torch.no_grad():
                for entry in step.model.params:
                    entry.param.mul_(factor)
            yield step

    monkeypatch.setattr(steps, "build_train_step", with_other_weights)
    with pytest.raises(CheckFailed, match="relative error"):
        steps.same_as_cpu(context, "latent")


def test_losses_that_differ_are_found(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "equal in all digits" in steps.same_twice(context).figure
    seeds = iter(range(100))
    right = steps.create_random_batch
    monkeypatch.setattr(steps, "create_random_batch", lambda job, step: right(job, step)[next(seeds) % 2 :])
    with pytest.raises(CheckFailed, match="losses differ"):
        steps.same_twice(context)


# ---- speed


@pytest.mark.parametrize("name", ["tiny", "tiny-llama", "tiny-experts"])
def test_the_plain_loop_trains_the_same_model(name: str) -> None:
    """As many parameters, and as many FLOPs in products. torch counts the whole square of attention's scores."""
    shape = SHAPES[name]
    model = build_plain_model(shape)
    config = shape.model
    assert sum(param.numel() for param in model.parameters()) == count_parameters(config, shape.vocab)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.seq))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens)
    forward = count_flops_per_token(config, shape.vocab) / 3 + sum(count_attention_flops(config))
    assert counter.get_total_flops() == forward * tokens.numel()


def test_each_loop_is_timed_and_compared(context: CheckContext) -> None:
    reports: list[Outcome] = []
    context = CheckContext("cpu", context.folder, send_partial=reports.append)
    outcome = speed.eager(context, "experts")
    assert [row["loop"] for row in outcome.data["rows"]] == ["ours", "plain"] and outcome.figure.startswith("ours / plain ")
    assert [len(partial.data["rows"]) for partial in reports] == [1, 1, 1, 2, 2, 2], "the first figure does not wait for the second"
    assert [partial.data["rows"][-1]["attention"] for partial in reports] == ["unknown", "flash", "flash"] * 2, (
        "nor for the profiler"
    )
    ours, plain = outcome.data["rows"]
    assert ours["parameters"] == plain["parameters"] and abs(ours["first_loss"] - plain["first_loss"]) < 0.2
    assert (
        ours["attention"] == "flash"
        and ours["planned_gb"] > 0
        and ours["tokens_per_second"] == pytest.approx(64e3 / ours["milliseconds"])
    )


def test_a_loop_without_memory_does_not_take_the_other_away(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "measure_plain", fails)
    outcome = speed.eager(context, "350m")
    assert len(outcome.data["rows"]) == 1 and outcome.data["errors"] == ["plain eager: out of memory"]
    monkeypatch.setattr(speed, "measure_framework", fails)
    with pytest.raises(CheckFailed, match="ours eager: out of memory"):
        speed.eager(context, "350m")


def test_measured_peaks_are_compared_with_the_plan(context: CheckContext) -> None:
    def data(**changes: Any) -> CheckContext:
        row = {**vars(speed.Row("8b", "eager", "ours", 8, 1, 1.0, 1.0, 1.0, 1.0, 1.0, None, 10.5, 10.0, 9.0, "flash")), **changes}
        return CheckContext("cuda", context.folder, {"speed-8b": {"rows": [row]}})

    assert "8b eager 1.050" in speed.memory(data()).figure
    assert "0.700" in speed.memory(data(mode="compiled", peak_gb=7.0)).figure, "compiled layers keep less"
    for wrong in ({"peak_gb": 7.0}, {"peak_gb": 12.0}, {"mode": "compiled", "peak_gb": 12.0}):
        with pytest.raises(CheckFailed, match="largest error"):
            speed.memory(data(**wrong))
    with pytest.raises(CheckFailed, match="no speed check"):
        speed.memory(CheckContext("cuda", context.folder))


def test_a_loop_that_crashes_does_not_take_the_other_away(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Outcome] = []
    context = CheckContext("cpu", context.folder, send_partial=reports.append)

    def fails(*args: Any) -> Any:
        raise TypeError("no such kernel")

    monkeypatch.setattr(speed, "measure_framework", fails)
    with pytest.raises(CheckFailed, match="ours eager: TypeError: no such kernel"):
        speed.eager(context, "350m")
    assert [row["loop"] for row in reports[-1].data["rows"]] == ["plain"]


def test_speed_is_measured_where_the_profiler_does_not_work(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Outcome] = []
    assert profiles.profiler_works(CheckContext("cpu", context.folder, send_partial=reports.append)).data == {"works": True}
    assert [partial.data for partial in reports] == [{"works": False}], "it stands if the process dies"
    monkeypatch.setattr(profiles, "profile_step", lambda step, folder, device: trace.StepProfile())
    with pytest.raises(CheckFailed, match="no kernels"):
        profiles.profiler_works(context)
    monkeypatch.setattr(speed, "detect_attention_kernels", lambda step, device: 1 / 0)
    without = CheckContext("cpu", context.folder, {"profiler": {"works": False}})
    assert [row["attention"] for row in speed.eager(without, "350m").data["rows"]] == ["unknown"] * 2


@pytest.mark.parametrize(("device", "most"), [("cuda", 1), ("cpu", 2)])
def test_the_benchmark_keeps_few_models_in_memory(device: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one, on a CPU the two that take turns."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    numbers = []

    class Loop:
        def __init__(self, *args: Any) -> None:
            alive.add(self)

        def __call__(self) -> float:
            numbers.append(len(alive))
            return 1.0

    monkeypatch.setattr(
        single, "get_step_builders", lambda *args, **options: dict.fromkeys(("ours", "plain", "pure", "compiled"), Loop)
    )
    comparison = single._compare(SHAPES["tiny"], torch.float32, torch.device(device), 3, 1, compiled=True)
    assert max(numbers) == most and set(comparison.peer_times) == {"plain", "pure", "compiled"}
    assert all(len(comparison.compute_ratios(peer)) == 3 for peer in comparison.peer_times)
    assert set(comparison.all_times) == {"ours", "plain", "pure", "compiled"} == set(comparison.losses)


# ---- the kernel table


def _operation(name: str, number: int, dims: list[list[int]], kind: str = "c10::BFloat16", at: float = 0.0) -> dict[str, Any]:
    arguments = {"External id": number, "Input Dims": dims, "Input type": [kind] * len(dims)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": at, "dur": 1.0, "tid": 1, "args": arguments}


def _kernel(name: str, number: int, at: float, took: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": took, "args": {"External id": number, "stream": 7}}


def test_kernels_have_the_work_of_their_operations() -> None:
    """A trace as torch's profiler writes it on CUDA, of which some kernels overlap and one is of an unknown operation."""
    events = [
        {"ph": "M", "name": "process_name"},
        _operation("aten::mm", 1, [[100, 20], [20, 30]]),
        _operation("aten::addmm", 2, [[40, 30], [40, 20], [20, 30], []]),
        _operation("aten::add_", 3, [[1000], [1000], []], "float"),
        _operation("aten::_flash_attention_forward", 4, [[2, 512, 8, 64]] * 3),
        _kernel("nvjet_tst_128", 1, 100.0, 10.0),
        _kernel("nvjet_tst_128", 2, 105.0, 15.0),
        _kernel("void at::native::vectorized_elementwise_kernel<4>(int)", 3, 130.0, 5.0),
        _kernel("void pytorch_flash::flash_fwd_kernel<X>", 4, 140.0, 40.0),
        _kernel("unknown", 99, 180.0, 20.0),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 199.0, "dur": 1.0, "args": {}},
    ]
    profile = trace.read_trace(events, on_device=True)
    uses = {(use.kernel, use.operation): use for use in profile.kernels}
    assert profile.kernels[0].kernel.startswith("void pytorch_flash") and profile.launches == 6
    assert profile.milliseconds == 0.1 and profile.idle_share == pytest.approx(0.15) and profile.attention == "flash"
    product = uses["nvjet_tst_128", "aten::mm"]
    assert product.flops == 2 * 100 * 20 * 30 and product.bytes == 2 * (100 * 20 + 20 * 30 + 100 * 30)
    assert uses["nvjet_tst_128", "aten::addmm"].flops == 2 * 40 * 20 * 30
    assert uses["void at::native::vectorized_elementwise_kernel<4>(int)", "aten::add_"].bytes == 3 * 4000
    flash = uses["void pytorch_flash::flash_fwd_kernel<X>", "aten::_flash_attention_forward"]
    assert flash.flops == 2 * 2 * 8 * 512**2 * 64, "half of two products"
    assert uses["unknown", "?"].flops == 0


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7x64x128", "cudnn"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", "flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "efficient"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products of matrices"),
    ],
)
def test_attention_kernels_are_known_by_their_names(name: str, kernel: str) -> None:
    assert trace.find_attention_kernels([name, "elementwise"]) == kernel


def test_the_slowest_models_are_profiled(tmp_path: Path) -> None:
    def rows(model: str, ours: float) -> dict[str, Any]:
        both = (("ours", ours), ("plain", 100.0))
        return {"rows": [{"model": model, "mode": "eager", "loop": loop, "milliseconds": ms} for loop, ms in both]}

    data = {"speed-350m": rows("350m", 90.0), "speed-8b": rows("8b", 150.0), "speed-experts": rows("experts", 120.0)}
    context = CheckContext("cpu", tmp_path, data)
    assert profiles.rank_models(context) == ["8b", "experts", "350m", "1.3b"]
    outcome = profiles.profile(context, "2")
    assert outcome.data["model"] == "experts" and len(outcome.data["profile"]["kernels"]) == profiles.NUM_KERNELS


def test_idle_time_is_that_of_a_step_without_the_profiler(tmp_path: Path) -> None:
    row = {"model": "8b", "mode": "eager", "loop": "ours", "milliseconds": 100.0}
    context = CheckContext("cpu", tmp_path, {"speed-8b": {"rows": [row, {**row, "loop": "plain", "milliseconds": 1.0}]}})
    profiled = trace.StepProfile(milliseconds=120.0, idle_share=0.25)
    assert profiles._estimate_idle_share(context, "8b", profiled) == pytest.approx(0.1)
    assert profiles._estimate_idle_share(context, "350m", profiled) is None


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, int>(float*, int)", "CatArrayBatchedCopy<float, int>"),
        (
            "void at::native::elementwise_kernel<4, run(int)::{lambda(int)#1}>(int, char*)",
            "elementwise_kernel<4, run(int)::{lambda(int)#1}>",
        ),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH "),
    ],
)
def test_names_of_kernels_are_shortened(kernel: str, name: str) -> None:
    assert shorten_kernel_name(kernel) == name


# ---- how a check ends


def test_states(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_lab.gpu.checks import CHECKS

    check = CHECKS[0]
    errors = {"fail": CheckFailed("why"), "does not fit": DoesNotFit("why"), "crash": KeyError("why")}
    for state, error in errors.items():

        def body(context: CheckContext, error: Exception = error) -> Outcome:
            raise error

        monkeypatch.setattr("megatron_lab.gpu.roofline.device_facts", body)
        result = run_check(check, context)
        assert result["state"] == state and "why" in result["figure"] + result["message"]


def test_a_rank_that_does_not_fit_says_so(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        total_memory = 10e9

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Small)
    with pytest.raises(DoesNotFit, match=r"a rank of the job .* needs [\d.]+ GB, but the device has only 10.0 GB"):
        rank(CheckContext("cuda", context.folder), "train_8gpu_llama_7b")


def test_attention_is_timed_on_the_shapes_of_the_speed_checks(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.attention import timing

    seen = []

    def stand_in(candidates: Any, inputs: Any) -> timing.KernelChoice:
        seen.append([tuple(x.shape) for x in inputs])
        return timing.KernelChoice("cudnn", {"flash": 2.0, "cudnn": 1.0}, {"efficient": "takes no groups"})

    monkeypatch.setattr(timing, "choose_on_device", stand_in)
    outcome = kernels.attention_speed(context)
    assert outcome.figure.startswith("350m: flash 2 ms, cudnn 1 ms, efficient failed (takes no groups); 1.3b: ")
    for (q, k, v), name in zip(seen, ("350m", "1.3b", "8b-layers"), strict=True):
        shape = SHAPES[name]
        assert k == v == (*q[:3], q[-1]) and q[:2] == (shape.seq, shape.batch)
        assert q[2] == (shape.kv_heads or shape.heads) and q[2] * q[3] == shape.heads and q[-1] * shape.heads == shape.hidden


def test_weight_gradients_of_experts_are_timed_both_ways(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_EXPERT_SHAPES", ((8, 32, 16, 4), (2, 8, 16, 4)))
    outcome = kernels.experts_speed(context)
    assert set(outcome.data["8"]) == {"loop", "grouped", "chosen"} and outcome.data["8"]["chosen"] == "grouped"
    assert outcome.data["2"]["chosen"] == "loop" and "2 experts: loop " in outcome.figure
