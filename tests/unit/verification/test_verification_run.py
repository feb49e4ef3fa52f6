"""Runs of settings at their layout beside the reference: what is observed, for which settings, and that faults are seen."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron.model.build
import megatron.training.loop
from megatron.config.cli import load
from megatron.config.config import Config
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.observation import Observation
from megatron_lab.verification.prove import prove
from megatron_lab.verification.random_samples import RandomSamples
from tests.support.verify_observations import prove_warm

BASIS = {
    "num-layers": "2",
    "hidden-size": "16",
    "num-attention-heads": "4",
    "ffn-hidden-size": "24",
    "seq-length": "8",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "2",
    "lr": "0.01",
    "vocab-size": "36",
    "make-vocab-size-divisible-by": "1",
    "tokenizer-type": "NullTokenizer",
}


def config_of(world_size: int, flags: str = "", **changes: str | None) -> Config:
    """The basis with changes (None takes a flag away) and further flags."""
    settings = BASIS | {name.replace("_", "-"): value for name, value in changes.items()}
    given = [word for name, value in settings.items() if value is not None for word in (f"--{name}", *value.split())]
    return load([*given, "--mock-data", *flags.split()], world_size).config


CASES: dict[str, tuple[int, str, dict[str, str | None]]] = {
    "tensor, pipeline, packed samples, float16, SGD": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --pipeline-schedule zb-h1 --fp16 "
        "--loss-scale-window 2 --reset-position-ids --reset-attention-mask --eod-mask-loss --position-embedding-type rope "
        "--rotary-seq-len-interpolation-factor 4 --qk-layernorm --group-query-attention --num-query-groups 2 --optimizer sgd "
        "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.3 --squared-relu",
        {},
    ),
    "pipeline, data, ramp-up, skipped first step, WSD": (
        4,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|L --data-parallel-sharding-strategy optim_grads "
        "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 700 --optimizer-cpu-offload "
        "--optimizer-offload-fraction 0.5 --rampup-batch-size 4 4 8 --iterations-to-skip 1 --lr-decay-style WSD "
        "--lr-wsd-decay-samples 8 --lr-warmup-fraction 0.2 --lr-warmup-init 0.001 --min-lr 0.001 --use-tp-pp-dp-mapping --bf16",
        {"num_layers": "4", "train_iters": None, "train_samples": "37"},
    ),
    "sharded parameters in two copies, Llama": (
        4,
        "--data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 2 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-percent 0.5 "
        "--lr-decay-style inverse-square-root --lr-warmup-iters 1 --lr-warmup-init 0.002 --adam-beta1 0.5 --adam-beta2 0.9 "
        "--adam-eps 1e-10 --clip-grad 0",
        {"make_vocab_size_divisible_by": "4", "micro_batch_size": "1"},
    ),
    "one rank": (1, "--attention-dropout 0 --deterministic-mode --manual-gc", {"global_batch_size": None}),
}


@functools.cache
def observed(case: str) -> Observation:
    world_size, flags, changes = CASES[case]
    return prove_warm(config_of(world_size, flags, **changes), world_size)


@pytest.fixture(params=list(CASES))
def observation(request: pytest.FixtureRequest) -> Observation:
    """Of each case."""
    return observed(request.param)


def test_the_framework_does_what_the_reference_does(observation: Observation) -> None:
    found = diagnose(observation)
    assert found.equal, found.findings


def test_every_step_and_every_evaluation_is_there(observation: Observation) -> None:
    training, plain = observation.config.training, observation.reference
    made = [step.iteration for step in plain.steps]
    assert made == [i for i in range(1, 6 if training.train_samples else 3) if i not in training.iterations_to_skip]
    assert len(plain.evaluations) == len(made) + 1 == len(set(plain.evaluations)), "every update changes the loss"
    for rank in observation.ranks:
        assert [step.iteration for step in rank.steps] == made and len(rank.evaluations) == len(made) + 1


def test_each_sample_and_position_is_seen_once_by_each_layer(observation: Observation) -> None:
    model, tp = observation.config.model, observation.config.parallel.tensor_model_parallel_size
    split = tp if observation.config.parallel.sequence_parallel else 1
    batch = len(observation.reference.microbatches) * observation.config.training.micro_batch_size
    seen: Counter[tuple[str, int, int]] = Counter()
    for rank in observation.ranks:
        if split > 1 or rank.coordinates["tp"] == 0:
            for each in rank.activations:
                samples, positions, hidden = each.values.shape
                assert hidden == model.hidden_size
                seen.update((each.name, each.offsets[0] + i, each.offsets[1] + j) for i in range(samples) for j in range(positions))
    parts = ("", ".attention", ".mlp")
    names = ["embedding", *(f"layers.{layer}{part}" for layer in range(model.num_layers) for part in parts)]
    assert seen == Counter((name, i, j) for name in names for i in range(batch) for j in range(model.seq_length))
    assert observation.reference.activations.keys() == set(names)


def test_contributions_add_up(observation: Observation) -> None:
    plain = observation.reference
    data = {rank.coordinates["dp"] for rank in observation.ranks}
    assert set(plain.microbatches) == {(rank, index) for rank in data for index in range(len(plain.microbatches) // len(data))}
    assert sum(plain.microbatch_tokens) == plain.steps[0].token_count
    assert len(set(plain.microbatch_tokens)) > 1 or len(plain.microbatches) == 1, "masks differ"
    for name, gradient in plain.steps[0].gradients.items():
        assert torch.equal(plain.contributions[name].sum(dim=0), gradient)
        assert plain.contributions[name].shape == (len(plain.microbatches), *gradient.shape)


def test_what_ranks_count_is_the_whole(observation: Observation) -> None:
    for number, step in enumerate(observation.reference.steps):
        shares = [rank.steps[number] for rank in observation.ranks]
        assert sum(share.token_count for share in shares) == step.token_count
        assert sum(share.loss_sum for share in shares) == pytest.approx(step.loss_sum, rel=1e-12)
        squares = sum(square for share in shares for square in share.squared_norms.values())
        assert squares == pytest.approx(step.grad_norm**2, rel=1e-12)


def test_what_is_replaced_is_said() -> None:
    whole = observed("one rank").replaced_settings
    assert any(line.startswith("dtype") for line in whole) and any(line.startswith("--adam-eps: 1e-06") for line in whole)
    assert observed("one rank").config.model.attention_dropout == 0.1, "so that evaluation is seen to be without"
    assert not any("adam" in line for line in observed("tensor, pipeline, packed samples, float16, SGD").replaced_settings)


def test_steps_end_a_longer_run() -> None:
    observation = prove_warm(config_of(1, train_iters="1000"), 1, steps=2, dropout=False)
    assert [step.iteration for step in observation.ranks[0].steps] == [1, 2] and diagnose(observation).equal
    assert observation.config.model.hidden_dropout == 0.0


def test_a_wrong_learning_rate_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = megatron.training.loop.compute_learning_rate
    monkeypatch.setattr(megatron.training.loop, "compute_learning_rate", lambda *args: 1.01 * right(*args))
    trace = tmp_path / "trace"
    found = diagnose(prove(config_of(1, f"--save-trace {trace}"), 1))
    assert not found.equal and found.findings[0].step == 1
    assert not trace.exists(), "the tool writes the trace of its first proof; runs of parts of a layout must leave it as it is"


def test_initial_weights_that_depend_on_the_layout_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = megatron.model.build.fill

    def by_box(flat, record, boxes, seed):  # type: ignore[no-untyped-def]
        right(flat, record, boxes, seed + sum(box.slice.offsets[0] for box in boxes))

    monkeypatch.setattr("megatron.training.providers.fill", by_box)
    observation = prove(config_of(2, "--tensor-model-parallel-size 2"), 2, steps=1)
    assert not diagnose(observation).equal
    assert all(step.loss == observation.reference.steps[0].loss for step in observation.reference.steps), (
        "the start weights are as they were"
    )


def samples_of(**changes: int | bool) -> RandomSamples:
    return dataclasses.replace(RandomSamples(3, 64, 100, 99, 2, allows_empty_masks=True), **changes)  # type: ignore[arg-type]


def test_samples_are_functions_of_their_number() -> None:
    samples = samples_of()
    assert np.array_equal(samples.get_samples(4, 3)[1:], samples.get_samples(5, 2))
    assert np.array_equal(samples.get_masks(4, 3)[1:], samples.get_masks(5, 2))
    assert not np.array_equal(samples.get_samples(0, 1), samples.get_samples(1, 1))
    assert not np.array_equal(samples.get_samples(0, 4), samples_of(seed=4).get_samples(0, 4))


@pytest.mark.parametrize("eod", [0, 50, 99])
def test_samples_have_all_tokens_and_some_ends(eod: int) -> None:
    tokens = samples_of(eod=eod).get_samples(0, 200)
    assert tokens.shape == (200, 65) and set(np.unique(tokens)) == set(range(100))
    assert 1 < (tokens == eod).sum(axis=1).mean() < 6 and (tokens[:, 0] != eod).all()


def test_masks_differ_and_leave_something_to_predict() -> None:
    masks = samples_of().get_masks(0, 16)
    assert masks.sum(axis=1).tolist() == [64, 64, 32, 32, 1, 0, 0, 0] * 2
    assert samples_of(allows_empty_masks=False).get_masks(6, 2).sum(axis=1).tolist() == [17, 17]
    tokens = samples_of(vocab_size=2, eod=1, seq_length=2).get_samples(0, 40)[:, :-1]
    kept = samples_of(vocab_size=2, eod=1, seq_length=2).get_masks(0, 40)
    assert (((kept > 0) & (tokens != 1)).any(axis=1) == (kept > 0).any(axis=1)).all()
