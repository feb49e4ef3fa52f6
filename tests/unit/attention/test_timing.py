"""Attention's kernel by measurement: what is timed, what is chosen, and that all ranks take the same one. No time is measured."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from megatron.attention import timing
from megatron.attention.backends import get_enabled_kernels
from megatron.attention.timing import AttentionStep, KernelChoice, choose_kernel
from megatron.config.config import Config
from megatron.config.model import ModelConfig
from megatron.config.precision import SpeedConfig
from megatron.model.compiled import BlockCompiler, compute_cache_tag
from megatron.parallel.context import make_context
from megatron.parallel.topology import Topology
from megatron.spec.attention_backends import AttentionKernel
from megatron.training import startup
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.lone_rank import CPU

BOTH: tuple[AttentionKernel, ...] = ("flash", "cudnn")
CONFIG = Config(model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16))


def test_a_kernel_that_fails_is_left_out() -> None:
    def time_kernel(kernel: AttentionKernel) -> float:
        if kernel == "cudnn":
            raise RuntimeError("No valid execution plans built.\nmore")
        return 2.0

    choice = choose_kernel(BOTH, time_kernel)
    assert choice == KernelChoice("flash", {"flash": 2.0}, {"cudnn": "No valid execution plans built."})
    assert str(choice) == "flash 2 ms, cudnn failed (No valid execution plans built.)"
    assert choose_kernel(("cudnn",), time_kernel).kernel == "cudnn", "the first step then raises the error"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (float("nan"), "its gradient of q contains NaN or infinity"),
        (3.0, "its results differ from those of the kernel that was measured first"),
    ],
)
def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch, wrong: float, error: str) -> None:
    """NaN in one row of a gradient, as of cuDNN's kernel, or other numbers."""
    step = AttentionStep((torch.randn(8, 2, 2, 2, 4), torch.randn(8, 2, 2, 4), torch.randn(8, 2, 2, 4)), 0.0)
    step.check()
    step.check()
    attention = timing.core_attention

    def with_wrong_gradient(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = torch.ones_like(q)
        scale[3] = wrong
        q = q.view_as(q)
        q.register_hook(lambda grad: grad * scale)
        return attention(q, *args, **kwargs)

    monkeypatch.setattr(timing, "core_attention", with_wrong_gradient)
    with pytest.raises(RuntimeError, match=error):
        step.check()


def test_gradients_that_are_zero_are_equal() -> None:
    """Of one token: its softmax is one whatever its score is."""
    step = AttentionStep((torch.randn(1, 2, 2, 2, 4), torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4)), 0.0)
    assert not step()[1].any()
    step.check()
    step.check()


def choice_of_rank(rank: int) -> tuple[KernelChoice | None, tuple[AttentionKernel, ...], bool]:
    """Return the choice of a rank, the kernels it then uses, and whether those of before come back. The first rank measures that
    cuDNN's kernel is faster, and the other would find the opposite."""
    patch = pytest.MonkeyPatch()
    patch.setattr(startup, "get_kernels_to_time", lambda call: BOTH)
    times: dict[AttentionKernel, float] = {"flash": 2.0 - rank, "cudnn": 1.0 + rank}
    patch.setattr(timing, "choose_on_device", lambda kernels, *_: choose_kernel(kernels, times.__getitem__))
    before = get_enabled_kernels()
    choice, previous = startup.choose_attention_kernel(CONFIG, make_context(Topology(dp=2), rank, CPU))
    used = get_enabled_kernels()
    previous()
    return choice, used, get_enabled_kernels() == before


def test_all_ranks_take_the_choice_of_the_first() -> None:
    for choice, used, restored in run_ranks(2, choice_of_rank, timeout=60.0):
        assert choice == KernelChoice("cudnn", {"flash": 2.0, "cudnn": 1.0}, {}) and used == ("cudnn",) and restored


def test_nothing_is_timed_on_a_cpu_nor_where_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "choose_on_device", lambda *_: pytest.fail("timed"))
    context = make_context(Topology(), 0, CPU)
    assert startup.choose_attention_kernel(CONFIG, context)[0] is None
    monkeypatch.setattr(startup, "get_kernels_to_time", lambda call: BOTH)
    named = Config(model=CONFIG.model, speed=SpeedConfig(attention_backend="math"))
    assert startup.choose_attention_kernel(named, context)[0] is None


def test_graphs_are_of_the_choice_even_if_the_model_was_built_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "get_kernels_to_time", lambda call: BOTH)
    monkeypatch.setattr(timing, "choose_on_device", lambda *_: KernelChoice("cudnn", {"flash": 2.0, "cudnn": 1.0}, {}))
    BlockCompiler().compile_blocks([], CPU)
    compiled = Config(model=CONFIG.model, speed=SpeedConfig(compile=True))
    _, previous = startup.choose_attention_kernel(compiled, make_context(Topology(), 0, CPU))
    tag, expected = torch.compiler.config.cache_key_tag, compute_cache_tag()
    previous()
    assert tag == expected != compute_cache_tag()


class EventOfKernel:
    """Stands for a CUDA event: time runs by 1 ms for a step of flash attention, by 3 ms for one of another kernel."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        EventOfKernel.now += 1.0 if get_enabled_kernels() == ("flash",) else 3.0
        self.time = EventOfKernel.now

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: EventOfKernel) -> float:
        return end.time - self.time


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU's kernels be timed, by the events of a stand-in."""
    monkeypatch.setattr(torch.cuda, "Event", EventOfKernel)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())


@pytest.mark.usefixtures("stand_in")
def test_a_layer_is_timed_forward_and_backward_with_one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole measurement."""
    before, seen = get_enabled_kernels(), set()
    attention = timing.core_attention

    def watched(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.add(get_enabled_kernels())
        return attention(q, *args, **kwargs)

    monkeypatch.setattr(timing, "core_attention", watched)
    q, k, v = torch.empty(8, 2, 2, 2, 4), torch.empty(8, 2, 2, 4), torch.empty(8, 2, 2, 4)
    choice = timing.choose_on_device(("flash", "math"), (q, k, v))
    assert choice == KernelChoice("flash", {"flash": 1.0, "math": 3.0}, {})
    assert seen == {("flash",), ("math",)} and get_enabled_kernels() == before
    assert not any(tensor.requires_grad for tensor in (q, k, v))


@pytest.mark.usefixtures("stand_in")
def test_a_kernel_with_wrong_results_is_not_chosen_however_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = timing.core_attention

    def wrong(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(q, *args, **kwargs) * (float("nan") if get_enabled_kernels() == ("flash",) else 1.0)

    monkeypatch.setattr(timing, "core_attention", wrong)
    inputs = torch.empty(8, 2, 2, 2, 4), torch.empty(8, 2, 2, 4), torch.empty(8, 2, 2, 4)
    choice = timing.choose_on_device(("flash", "math"), inputs)
    assert choice == KernelChoice(
        "math",
        {"math": 3.0},
        {
            "flash": "its output contains NaN or infinity, although all inputs are finite. If another kernel works, "
            "--attention-backend auto uses it, and no action is needed"
        },
    )
