"""Compiled kernels are those of this run's settings, and the same on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.attention.backends import backend_in_use
from megatron.model.compiled import BlockCompiler, compute_cache_tag
from megatron_lab.monitoring.compiler_inputs import collect_compiler_inputs, describe_differences


def test_a_graph_of_another_kernel_of_attention_is_not_taken_from_the_cache() -> None:
    """torch's key of a graph lacks the kernel that it was traced with."""
    tags = []
    for backend in ("auto", "cudnn", "math"):
        with backend_in_use(backend):  # type: ignore[arg-type]
            BlockCompiler().compile_blocks([], torch.device("cpu"))
            tags.append(torch.compiler.config.cache_key_tag)
    assert len(set(tags)) == 3


def attend(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.usefixtures("compiles_before_forks")
def test_a_second_model_in_a_process_gets_graphs_of_its_own_kernel() -> None:
    """torch.compile takes a graph of the same function and compiler from memory, and its guards lack the kernel."""
    q, names = torch.rand(1, 1, 8, 8), []
    for backend in ("flash", "math"):
        with backend_in_use(backend), torch.profiler.profile() as profile:  # type: ignore[arg-type]
            compiler = BlockCompiler(backend="aot_eager")
            compiler.compile_blocks([], q.device)
            compiler.compile_function(attend)(q)
        names.append({event.name for event in profile.events() if "_flash_attention" in event.name})
    assert names[0] and not names[1]


def test_the_tag_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")
    with backend_in_use("math"):
        assert compute_cache_tag() == "mine/math"


def test_deterministic_runs_choose_no_kernel_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **named: options.append(named["options"] or {}))
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda deterministic=deterministic: deterministic)
        BlockCompiler().compile_function(len)
    assert [each.get("deterministic", False) for each in options] == [False, True]
    assert hasattr(torch._inductor.config, "deterministic"), "torch knows the option"


def test_ranks_that_compile_otherwise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a/folder")
    monkeypatch.delenv("TORCHINDUCTOR_MAX_AUTOTUNE", raising=False)
    plain = collect_compiler_inputs(torch.device("cpu"))
    assert plain["torch"] and plain["device"] == "cpu" and "TORCHINDUCTOR_CACHE_DIR" not in plain
    assert not list(describe_differences([plain, plain]))
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    (line,) = describe_differences([plain, plain, collect_compiler_inputs(torch.device("cpu"))])
    assert "TORCHINDUCTOR_MAX_AUTOTUNE is not set on 2 ranks, such as 0; 1 on 1 ranks, such as 2" in line
