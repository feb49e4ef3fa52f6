"""Dropout masks are a function of what they are for: the same at every data and pipeline layout, none in evaluation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.attention import core as attention_module
from megatron.config.memory import MemoryConfig
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import OptimizerConfig
from megatron.data.samples import DocumentRules, MockDataset
from megatron.model import block as dropout_module
from megatron.model.block import dropout
from megatron.model.build import build_model
from megatron.optimizer.grad_scaler import GradScaler
from megatron.parallel.context import ParallelContext, make_context
from megatron.parallel.random import DropoutKey, seed_device
from megatron.parallel.topology import Topology
from megatron.pipeline_parallel.partition import build_layer_table
from megatron.training.inputs import BatchBuilder
from megatron.training.step import TrainStep
from tests.support.lone_rank import CPU, lone_rank
from tests.support.warm import run_forked_ranks

VOCAB, SEQ, MICRO, GLOBAL, STEPS = 32, 8, 2, 8, 2
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, seq_length=SEQ, make_vocab_size_divisible_by=1)
KEY = DropoutKey(seed=1, step=8, first_sample=12)


# ---- one mask


def mask(key: DropoutKey = KEY, layer: int = 3, site: str = "mlp_output", coordinate: int = 0) -> torch.Tensor:
    torch.rand(3)  # the state of the generator must not matter
    return dropout(torch.ones(64, 64), 0.1, [key.get_site_seed(layer, site, coordinate)])


def test_a_mask_is_repeatable_and_has_the_asked_rate() -> None:
    first = mask()
    assert torch.equal(first, mask())
    assert (first == 0).double().mean().item() == pytest.approx(0.1, abs=0.02)
    kept = first[first != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.9))


def test_every_part_of_the_key_changes_the_mask() -> None:
    masks = [
        mask(),
        mask(replace(KEY, seed=2)),
        mask(replace(KEY, step=16)),
        mask(replace(KEY, first_sample=14)),
        mask(replace(KEY, step=12, first_sample=8)),
        mask(layer=4),
        mask(site="attention_output"),
        mask(coordinate=1),
        mask(replace(KEY, context_rank=1)),
    ]
    for a, b in itertools.combinations(masks, 2):
        both = ((a == 0) & (b == 0)).double().mean().item()
        assert both == pytest.approx(0.01, abs=0.008), "as independent masks"


def test_no_key_or_no_probability_is_no_dropout() -> None:
    x = torch.ones(8)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, [1]) is x


# ---- whole runs


def train(
    context: ParallelContext,
    model: ModelConfig = MODEL,
    sequence_parallel: bool = False,
    steps: int = STEPS,
    memory: MemoryConfig | None = None,
) -> dict[str, Any]:
    """Losses and gradient norms of some steps on made-up tokens, every seed that was set, and an evaluation."""
    parallel = ParallelConfig(pipeline_model_parallel_size=context.topology.pp)
    built = build_model(
        model,
        context,
        dtype=torch.float64,
        vocab_size=VOCAB,
        sequence_parallel=sequence_parallel,
        cp_comm_types=("p2p",),
        seed=5,
        table=build_layer_table(model, parallel, VOCAB, memory),
    )
    trainer = TrainStep(
        built,
        context,
        GradScaler(1.0),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(),
        micro_batch_size=MICRO,
        skip_overflow=False,
    )
    maker = BatchBuilder(context, 1, SEQ, MICRO, DocumentRules(VOCAB - 1))
    source = MockDataset(split=0, seed=3, seq_length=SEQ, vocab_size=VOCAB, eod=VOCAB - 1)
    batches = maker.iter_batches(
        source, global_batch_size_at=lambda _: GLOBAL, consumed_samples=0, total_samples=GLOBAL * steps, num_workers=0
    )
    seeds: dict[str, list[int]] = {"attention": [], "hidden": []}

    def noting(kind: str) -> Any:
        def note(device: torch.device, seed: int) -> None:
            seeds[kind].append(seed)
            seed_device(device, seed)

        return note

    found: dict[str, Any] = {"losses": [], "norms": [], "seeds": seeds}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "seed_device", noting("attention"))
        patch.setattr(dropout_module, "seed_device", noting("hidden"))
        for i, batch in enumerate(batches):
            result = trainer.run(batch, iteration=i + 1, learning_rate=1e-2, weight_decay=0.1)
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
        during = {kind: len(found) for kind, found in seeds.items()}
        evaluation = list(maker.iter_evaluation_batches(source, global_batch_size=GLOBAL, num_batches=1))
        found["evaluations"] = [trainer.evaluate(evaluation[0]) for _ in range(2)]
        assert during == {kind: len(found) for kind, found in seeds.items()}, "no mask is drawn in evaluation"
    found["replicated"] = {shard.record.name: shard.grad.clone() for shard in trainer.optimizer.shards if not shard.record.splits}
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return train(lone_rank())


def on_two_ranks(rank: int) -> dict[str, Any]:
    layouts = {"dp": Topology(dp=2), "pp": Topology(pp=2), "tp": Topology(tp=2), "cp": Topology(cp=2)}
    contexts = {name: make_context(topology, rank, CPU) for name, topology in layouts.items()}
    found = {name: train(context) for name, context in contexts.items()}
    found["sp"] = train(contexts["tp"], sequence_parallel=True, steps=1)
    found["tp only hidden"] = train(contexts["tp"], replace(MODEL, attention_dropout=0.0))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_forked_ranks(2, on_two_ranks, timeout=60.0)


@pytest.mark.parametrize("layout", ["dp", "pp"])
def test_data_and_pipeline_layouts_draw_the_masks_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], layout: str
) -> None:
    for rank in range(2):
        assert two[rank][layout]["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert two[rank][layout]["norms"] == pytest.approx(one["norms"], rel=1e-12)
    for kind in ("attention", "hidden"):
        seeds = [two[rank][layout]["seeds"][kind] for rank in range(2)]
        assert sorted(seeds[0] + seeds[1]) == sorted(one["seeds"][kind])


def test_hidden_dropout_alone_is_the_same_over_tensor_ranks(two: list[dict[str, Any]]) -> None:
    """Without sequence parallelism its masks lie on replicas, so even the tensor layout does not change them."""
    expected = train(lone_rank(), replace(MODEL, attention_dropout=0.0))
    for rank in range(2):
        assert two[rank]["tp only hidden"]["losses"] == pytest.approx(expected["losses"], rel=1e-12)


def test_dropout_acts(one: dict[str, Any]) -> None:
    without = train(lone_rank(), replace(MODEL, hidden_dropout=0.0, attention_dropout=0.0))
    assert not any(without["seeds"].values())
    for probability in ("hidden_dropout", "attention_dropout"):
        found = train(lone_rank(), replace(MODEL, **{probability: 0.0}), steps=1)  # type: ignore[arg-type]
        assert abs(found["losses"][0] - one["losses"][0]) > 1e-6
        assert abs(found["losses"][0] - without["losses"][0]) > 1e-6


def test_no_two_masks_of_a_run_are_alike(one: dict[str, Any]) -> None:
    """One for the embedding and three a layer (attention weights, two outputs), for each microbatch and step."""
    microbatches = STEPS * GLOBAL // MICRO
    assert len(one["seeds"]["attention"]) == microbatches * MODEL.num_layers
    assert len(one["seeds"]["hidden"]) == microbatches * (1 + 2 * MODEL.num_layers)
    seeds = one["seeds"]["attention"] + one["seeds"]["hidden"]
    assert len(set(seeds)) == len(seeds)


def test_what_is_computed_again_draws_the_same_masks(one: dict[str, Any]) -> None:
    """No mask and no generator is kept: each is drawn again from its key, and no bit changes."""
    memories = {
        MemoryConfig("full"): {"attention": 1, "hidden": 2},
        MemoryConfig("full", recompute_num_layers=2): {"attention": 1, "hidden": 2},
        MemoryConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp")): {"attention": 1, "hidden": 0},
    }
    for memory, again in memories.items():
        found = train(lone_rank(), memory=memory)
        for what in ("losses", "norms", "evaluations"):
            assert found[what] == one[what], what
        assert all(torch.equal(found["replicated"][name], one["replicated"][name]) for name in one["replicated"])
        for kind, seeds in one["seeds"].items():
            drawn = found["seeds"][kind]
            assert set(drawn) == set(seeds)
            assert len(drawn) - len(seeds) == again[kind] * MODEL.num_layers * STEPS * GLOBAL // MICRO


def test_evaluation_has_no_dropout(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """It gives the same twice, and the same at every layout that trained to the same weights."""
    for found in (one, *(ranks[layout] for ranks in two for layout in ranks)):
        assert found["evaluations"][0] == found["evaluations"][1]
    for layout in ("dp", "pp"):
        assert two[0][layout]["evaluations"][0] == pytest.approx(one["evaluations"][0], rel=1e-12)


def test_tensor_ranks_draw_other_masks_for_their_heads_and_the_same_on_replicas(two: list[dict[str, Any]]) -> None:
    """Under sequence parallelism also hidden states are split, and each rank draws for its part."""
    first, second = two[0]["tp"]["seeds"], two[1]["tp"]["seeds"]
    assert len(first["attention"]) == len(second["attention"]) > 0
    assert not set(first["attention"]) & set(second["attention"])
    assert first["hidden"] == second["hidden"]
    assert not set(first["attention"]) & set(first["hidden"])
    split = [two[rank]["sp"]["seeds"] for rank in range(2)]
    assert not (set(split[0]["hidden"]) | set(split[0]["attention"])) & (set(split[1]["hidden"]) | set(split[1]["attention"]))


def test_context_ranks_draw_other_masks_for_their_tokens(two: list[dict[str, Any]]) -> None:
    first, second = (set(found["cp"]["seeds"]["hidden"]) for found in two)
    assert len(first) == len(second) > 0 and not first & second


@pytest.mark.parametrize("layout", ["tp", "sp", "cp"])
def test_replicas_stay_replicas_under_dropout(two: list[dict[str, Any]], layout: str) -> None:
    first, second = two[0][layout]["replicated"], two[1][layout]["replicated"]
    assert first.keys() == second.keys() and "final_norm.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stages_that_read_no_tokens_know_the_same_keys() -> None:
    """Of three stages the middle one reads nothing; with a batch that grows."""
    maker = BatchBuilder(lone_rank(Topology(pp=3, dp=2), 3), 1, SEQ, MICRO, DocumentRules(VOCAB - 1))
    source = MockDataset(split=0, seed=3, seq_length=SEQ, vocab_size=VOCAB, eod=VOCAB - 1)
    keys = []
    for given in (source, None):
        batches = maker.iter_batches(
            given,
            global_batch_size_at=lambda consumed: 4 if consumed < 8 else 12,
            consumed_samples=4,
            total_samples=32,
            num_workers=0,
        )
        keys.append([[inputs.dropout_key for inputs in batch] for batch in batches])
    assert keys[0] == keys[1]
    assert [[(key.step, key.first_sample) for key in step if key] for step in keys[0]] == [
        [(4, 6)],
        [(8, 10), (8, 14), (8, 18)],
        [(20, 22), (20, 26), (20, 30)],
    ]
