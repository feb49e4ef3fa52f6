"""Texts that follow each other: what is kept in the cache changes no token, and a new token costs the work of one token."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron_lab.inference.forward import Decoder, select_num_threads
from megatron_lab.inference.generate import GenerationRequest, Sampling
from megatron_lab.inference.session import GenerationSession
from tests.proof.test_inference_generate import GREEDY, SHAPES, build, generate_all
from tests.support.layout import Layout, context_of
from tests.support.warm import run_warm_ranks

LONG = [(7 * i + 3) % 60 for i in range(32)]
PROMPTS = [LONG[:17], [*LONG[:17], 5, 1], [*LONG[:16], 9], LONG[:20], [4, 4], [4, 4], [*LONG[:18], 1]]
"""Prompts after each other: longer by two tokens, another last token, longer by many, another text, the same again, another."""


@pytest.fixture
def alone() -> ParallelContext:
    return make_context(Topology(), 0, torch.device("cpu"))


def answers_of(session: GenerationSession, sampling: Sampling, new_tokens: int = 6) -> list[list[int | None]]:
    """Return the answers to all prompts, of one session."""
    return [
        list(session.generate(GenerationRequest([prompt], new_tokens, sampling, eod=7, first_prompt=turn), sample_index=1))
        for turn, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("style", ["gpt2", "llama", "windows-sinks", "latents"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, seed=2)], ids=["greedy", "sampled"])
def test_answers_are_those_of_a_fresh_computation(alone: ParallelContext, style: str, sampling: Sampling) -> None:
    model = build(SHAPES[style], alone)
    session = GenerationSession(model, alone)
    expected = []
    for turn, prompt in enumerate(PROMPTS):
        request = GenerationRequest([prompt], 6, sampling, eod=7, first_prompt=turn)
        expected.append(list(GenerationSession(model, alone).generate(request, sample_index=1)))
    assert answers_of(session, sampling) == expected
    num_tokens = sum(map(len, PROMPTS)) + sum(len(answer) - 1 for answer in expected)
    assert session.num_computed_tokens < num_tokens or style == "windows-sinks", "a common beginning is computed once"
    if sampling.is_greedy:
        assert [[id for id in answer if id is not None] for answer in expected] == [
            generate_all(model, alone, GenerationRequest([prompt], 6, sampling, eod=7))[0] for prompt in PROMPTS
        ]


def test_a_regenerated_answer_costs_one_token_of_the_prompt(alone: ParallelContext) -> None:
    session = GenerationSession(build(SHAPES["llama"], alone), alone)
    request = GenerationRequest([LONG], 1, GREEDY)
    first = list(session.generate(request))
    assert session.num_computed_tokens == len(LONG)
    assert list(session.generate(request)) == first and session.num_computed_tokens == len(LONG) + 1


def test_an_answer_that_is_stopped_leaves_a_usable_cache(alone: ParallelContext) -> None:
    model = build(SHAPES["llama"], alone)
    session = GenerationSession(model, alone)
    request = GenerationRequest([LONG[:20]], 10, GREEDY)
    expected = list(GenerationSession(model, alone).generate(request))
    received: list[int | None] = []
    for id in session.generate(request, lambda: len(received) == 4):
        received.append(id)
    assert received == expected[:4]
    longer = [*LONG[:20], *(id for id in received if id is not None)]
    assert list(session.generate(GenerationRequest([longer], 6, GREEDY))) == expected[4:]


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2), pytest.param(Layout(cp=2), marks=pytest.mark.full("prompts that are split, beside the other axes"))],
    ids=["tp2-pp2", "cp2"],
)
def test_any_rank_stops_all_ranks(layout: Layout) -> None:
    """The same answers on every rank as on one; a request to stop on any of the ranks ends the answer on all."""
    alone = make_context(Topology(), 0, torch.device("cpu"))
    expected = answers_of(GenerationSession(build(SHAPES["gpt2"], alone), alone), GREEDY)
    for answers, stopped in run_warm_ranks(layout.world_size, session_of_rank, layout):
        assert answers == expected and [len(answer) for answer in stopped] == list(range(1, 1 + layout.world_size))


def session_of_rank(rank: int, layout: Layout) -> tuple[list[list[int | None]], list[list[int | None]]]:
    """Return all answers of a rank, and answers that one rank stops: rank r the answer r, after r + 1 tokens."""
    context = context_of(layout, rank)
    session = GenerationSession(build(SHAPES["gpt2"], context), context)
    answers, stopped = answers_of(session, GREEDY), []
    for stopping_rank in range(layout.world_size):
        received: list[int | None] = []
        request = GenerationRequest([LONG[:20]], 12, GREEDY)
        for id in session.generate(request, lambda r=stopping_rank, seen=received: rank == r and len(seen) == r + 1):  # type: ignore[misc]
            received.append(id)
        stopped.append(received)
    return answers, stopped


# ---- Work for each token


class _Counter(TorchDispatchMode):
    """Counter of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def count_work(decoder: Decoder) -> tuple[int, int]:
    """Return the numbers of torch's operations and of calls of Python functions in one step with a single token."""
    token = torch.tensor([3])
    with _Counter() as counter:
        decoder.decode(token)
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        decoder.decode(token)
    finally:
        sys.setprofile(None)
    return counter.num_operations, num_calls


MOST_WORK = {"gpt2": (60, 260), "llama": (75, 285), "latents": (115, 430)}
"""Upper bounds for each layer: operations of torch, calls of Python functions."""


@pytest.mark.parametrize("style", MOST_WORK)
def test_a_token_costs_few_operations(alone: ParallelContext, style: str) -> None:
    """As many for a long text as for a short one, and few enough that a small model is not slow."""
    shape = SHAPES[style]
    model = build(shape, alone, torch.float32)
    work = []
    for num_tokens in (3, 24):
        decoder = Decoder(model, alone, 32)
        decoder.prefill([LONG[:num_tokens]])
        decoder.decode(torch.tensor([3]))
        work.append(count_work(decoder))
    assert work[0] == work[1]
    assert all(count <= bound * shape.num_layers for count, bound in zip(work[0], MOST_WORK[style], strict=True)), work[0]


def test_small_products_use_one_thread(alone: ParallelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other on a busy machine made generation twenty times slower."""
    model = build(SHAPES["llama"], alone, torch.float32)
    assert select_num_threads(model, 1, 8) == 1 and select_num_threads(model, 10**6, 8) == 8
    used: list[int] = []
    model.chunks[0].blocks[0].register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        decoder = Decoder(model, alone, 32)
        decoder.prefill([LONG[:4]])
        decoder.decode(torch.tensor([3]))
        assert used == [1, 1] and torch.get_num_threads() == 2, "the caller's number comes back"
        monkeypatch.setenv("OMP_NUM_THREADS", "2")  # chosen by the user
        Decoder(model, alone, 32).prefill([LONG[:4]])
        assert used[2:] == [2]
    finally:
        torch.set_num_threads(before)
