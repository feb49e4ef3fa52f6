"""Generation with keys and values kept is generation that reads everything again, at every layout; and what ends it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron.model.build import Model
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.topology import Topology
from megatron_lab.inference.forward import Decoder
from megatron_lab.inference.generate import GenerationRequest, Sampling, generate
from megatron_lab.inference.model_from_source import load_model
from megatron_lab.verification.reference.model import compute_logits
from megatron_lab.verification.reference.rotary import RotaryScaling
from megatron_lab.verification.reference.shape import LatentShape, ReferenceShape, Weights, build_random_weights
from tests.support.covering import full_but
from tests.support.layout import Layout, context_of
from tests.support.memory_source import reference_source
from tests.support.reference_runs import deepseek_like, gpt2_like, llama_like
from tests.support.warm import run_warm_ranks

VOCAB = 61
SHAPES = {
    "gpt2": gpt2_like(num_layers=3, vocab=VOCAB, num_positions=32),
    "llama": llama_like(num_layers=2, vocab=VOCAB, heads=6, kv_heads=3, head_size=6),
    "qk-norm-part-rotated": llama_like(num_layers=2, vocab=VOCAB, kv_heads=1, qk_norm=True, rotary_percent=0.5, tied=True),
    "no-positions": gpt2_like(num_layers=2, vocab=VOCAB, positions="none"),
    # Prompts are within the original context, and the whole sequences beyond it.
    "longrope": llama_like(
        vocab=VOCAB,
        rotary_interleaved=True,
        rope_scaling=RotaryScaling(
            "longrope", 1.0, 12, attention_factor=0.8, short_factors=(9.0,) * 4, long_factors=(1.0, 1.5, 2.0, 4.0)
        ),
    ),
    # Of the prompts some are longer than a window and some shorter; some rows fill it while others are beyond it.
    "windows-two-bases": llama_like(
        num_layers=3, vocab=VOCAB, windows=(3, None, 3), local_base=20.0, unrotated=(False, True, False)
    ),
    "windows-sinks": llama_like(
        num_layers=2, vocab=VOCAB, kv_heads=1, windows=(7, None), sink="learned", score_scale=0.3, output_bias=True
    ),
    "windows-caps": gpt2_like(num_layers=2, vocab=VOCAB, num_positions=32, windows=(None, 1), score_cap=0.5, sink="one"),
    "latents": deepseek_like(num_layers=2, vocab=VOCAB),
    "latents-windows-sinks": deepseek_like(
        num_layers=2,
        vocab=VOCAB,
        windows=(7, None),
        sink="learned",
        latent=LatentShape(None, 6, qk_head_dim=5, qk_pos_emb_head_dim=4, v_head_dim=3),
    ),
    "norms-over-all-heads": llama_like(num_layers=2, vocab=VOCAB, qk_norm=True, qk_norm_all_heads=True, windows=(0, None)),
}
PROMPTS = [[5, 9, 2, 60, 7], [1], [3, 3, 8, 0, 12, 44, 2, 19, 23]]
GREEDY = Sampling(temperature=0)


def generate_all(model: Model, context: ParallelContext, request: GenerationRequest) -> list[list[int]]:
    """The new tokens of every sequence, without the end of document, in the order of `generate`."""
    found: list[list[int]] = [[] for _ in range(len(request.prompts) * request.num_samples)]
    for ids in generate(model, context, request):
        for sequence, id in zip(found, ids, strict=True):
            if id is not None:
                sequence.append(id)
    return found


def weights_of(shape: ReferenceShape) -> Weights:
    return build_random_weights(shape, seed=3, std=0.2)


def build(shape: ReferenceShape, context: ParallelContext, dtype: torch.dtype = torch.float64) -> Model:
    return load_model(reference_source(shape, weights_of(shape), vocabulary_multiple=8), context, dtype)


@pytest.fixture
def alone() -> ParallelContext:
    return make_context(Topology(), 0, torch.device("cpu"))


def by_recomputation(style: str, prompt: list[int], count: int, whole: int = 0) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the scores each was chosen by, from the plain model, which reads the whole sequence for each.

    Args:
        whole: tokens of the longest sequence in the end: so many are read, whatever the last ones are.
    """
    return _recomputed(style, tuple(prompt), count, whole)


@functools.cache
def _recomputed(style: str, prompt: tuple[int, ...], count: int, whole: int) -> tuple[list[int], torch.Tensor]:
    ids, scores = list(prompt), []
    shape, weights = SHAPES[style], weights_of(SHAPES[style])
    for _ in range(count):
        read = ids + [0] * (whole - len(ids))
        scores.append(compute_logits(shape, weights, torch.tensor([read]))[0, len(ids) - 1])
        ids.append(int(scores[-1].argmax()))
    return ids[len(prompt) :], torch.stack(scores)


DTYPES = {"float64": torch.float64, "float32": torch.float32}
ROWS = {"one": PROMPTS[:1], "ragged": PROMPTS, "level": [PROMPTS[0], PROMPTS[0][::-1]]}
SCORED = [(style, precision, rows) for style in SHAPES for precision in DTYPES for rows in ROWS]


@pytest.mark.parametrize(
    ("style", "precision", "rows"),
    full_but(
        [case for case in SCORED if case[1:] == ("float64", "ragged") or case[0] == "windows-sinks"],
        SCORED,
        "the same style with prompts of several lengths, and another style in each way",
    ),
)
def test_scores_are_those_of_recomputation(alone: ParallelContext, style: str, precision: str, rows: str) -> None:
    shape, count, dtype, prompts = SHAPES[style], 12, DTYPES[precision], ROWS[rows]
    whole = max(map(len, prompts)) + count
    decoder = Decoder(build(shape, alone, dtype), alone, whole)
    expected = [by_recomputation(style, prompt, count, whole if style == "longrope" else 0) for prompt in prompts]
    found = decoder.prefill(prompts)
    for step in range(count):
        assert found is not None and found.shape == (len(prompts), VOCAB)
        wanted = torch.stack([scores[step] for _, scores in expected])
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
        if step + 1 < count:
            found = decoder.decode(torch.tensor([ids[step] for ids, _ in expected]))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, cp=2, pp=2),
        *(
            pytest.param(layout, marks=pytest.mark.full("all of these groups at once"))
            for layout in (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(cp=2), Layout(cp=4))
        ),
    ],
    ids=["one", "tp2-cp2-pp2", "tp2", "pp2", "tp2-pp2", "cp2", "cp4"],
)
def test_the_same_text_at_every_layout(layout: Layout) -> None:
    """Greedy as by recomputation on every rank; drawn as by one process."""
    found = run_warm_ranks(layout.world_size, texts, layout)
    greedy, sampled = found[0]
    assert all(rank == found[0] for rank in found)
    assert greedy == [by_recomputation("windows-sinks", prompt, 10)[0] for prompt in PROMPTS for _ in range(2)]
    assert all(len(set(map(tuple, sampled[2 * i : 2 * i + 2]))) == 2 for i in range(len(PROMPTS))), "samples of a prompt differ"
    assert sampled == texts_of_one_process()[1]


def texts(rank: int, layout: Layout) -> list[list[list[int]]]:
    """Return the texts of a rank: greedy, and drawn."""
    context = context_of(layout, rank)
    model = build(SHAPES["windows-sinks"], context)
    drawn = Sampling(temperature=1.3, top_k=30, top_p=0.9, seed=5)
    return [generate_all(model, context, GenerationRequest(PROMPTS, 10, sampling, num_samples=2)) for sampling in (GREEDY, drawn)]


@functools.cache
def texts_of_one_process() -> list[list[list[int]]]:
    return texts(0, Layout())


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.full("4, of which some have no token of a prompt"))])
def test_context_ranks_share_the_prompts(ranks: int, full: bool) -> None:
    """Their scores are those of one rank, of whatever each layer keeps; the next tokens are read by all."""
    styles = tuple(SHAPES) if full else ("gpt2", "longrope", "windows-two-bases", "windows-sinks", "latents-windows-sinks")
    alone = scores(0, 1, styles)
    for found in run_warm_ranks(ranks, scores, ranks, styles):
        for mine, wanted in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def scores(rank: int, ranks: int, styles: tuple[str, ...]) -> list[list[torch.Tensor | None]]:
    """Return the scores of a context rank: of these styles, for the prompts and for some next tokens."""
    found, context = [], make_context(Topology(cp=ranks), rank, torch.device("cpu"))
    for style in styles:
        decoder = Decoder(build(SHAPES[style], context), context, 14)
        first = decoder.prefill(PROMPTS)
        found.append([first, *(decoder.decode(torch.tensor([7, 1, 30 + step])) for step in range(4))])
    return found


def test_a_sequence_does_not_depend_on_what_is_beside_it(alone: ParallelContext) -> None:
    shape = SHAPES["gpt2"]
    model, sampling = build(shape, alone), Sampling(temperature=2.0, seed=3)
    together = generate_all(model, alone, GenerationRequest(PROMPTS, 12, sampling, num_samples=3))
    for number, prompt in enumerate(PROMPTS):
        apart = generate_all(model, alone, GenerationRequest([prompt], 12, sampling, num_samples=2, first_prompt=number))
        assert apart == together[3 * number : 3 * number + 2]
    assert together != generate_all(
        model, alone, GenerationRequest(PROMPTS, 12, dataclasses.replace(sampling, seed=4), num_samples=3)
    )


def test_the_end_of_a_document_ends_a_sequence(alone: ParallelContext) -> None:
    """Only that one; the others go on, unchanged, until all have ended."""
    shape = SHAPES["llama"]
    model = build(shape, alone)
    free = generate_all(model, alone, GenerationRequest(PROMPTS, 12, GREEDY))
    end = next(id for id in free[0][3:11] if all(id != ids[0] for ids in free))
    expected = [ids[: ids.index(end)] if end in ids else ids for ids in free]
    assert [] not in expected and len(expected[0]) < 12
    assert generate_all(model, alone, GenerationRequest(PROMPTS, 12, GREEDY, eod=end)) == expected
    steps = list(generate(model, alone, GenerationRequest(PROMPTS[:1], 12, GREEDY, eod=end)))
    assert steps == [*([id] for id in expected[0]), [None]]


def test_ids_without_a_text_are_never_chosen(alone: ParallelContext) -> None:
    """Neither padding, whose weights are zero and whose score may be the highest, nor rows beyond the tokenizer."""
    shape = SHAPES["gpt2"]
    model = build(shape, alone)
    with torch.no_grad():
        model.params["embedding.word.weight"].param.mul_(1e-3)  # scores near 0, as those of padding
    free = generate_all(model, alone, GenerationRequest(PROMPTS, 16, Sampling(temperature=50.0), num_samples=8))
    assert max(max(ids) for ids in free) < VOCAB
    fewer = generate_all(model, alone, GenerationRequest(PROMPTS, 16, Sampling(temperature=50.0), num_samples=8, num_ids=20))
    assert max(max(ids) for ids in fewer) < 20 <= max(max(ids) for ids in free)


def test_what_memory_held_before_does_not_matter(alone: ParallelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row shorter than others has places that nothing was written to."""
    shape = SHAPES["llama"]
    plain = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return plain(self, *args, **named).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    found = generate_all(build(shape, alone), alone, GenerationRequest(PROMPTS, 8, GREEDY))
    assert found == [by_recomputation("llama", prompt, 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [([[1], []], 4, "has no tokens"), ([[1, VOCAB]], 4, "the model has ids 0 to 60"), ([[1] * 30], 4, "32 positions")],
)
def test_what_cannot_be_generated(alone: ParallelContext, prompts: list[list[int]], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(build(SHAPES["gpt2"], alone), alone, GenerationRequest(prompts, count, GREEDY)))


def test_a_layer_with_a_window_keeps_no_more_than_it(alone: ParallelContext) -> None:
    """Of the longest prompt and of what comes after it."""
    decoder = Decoder(build(SHAPES["windows-two-bases"], alone), alone, 30)
    decoder.prefill(PROMPTS, num_samples=2)
    for _ in range(5):
        decoder.decode(torch.zeros(2 * len(PROMPTS), dtype=torch.long))
    room = {layer: k.shape[2] for layer, (k, _) in decoder.cache._layers.items()}
    assert room == {0: 4, 1: 30, 2: 4}
