"""Runs of Megatron-LM go on here: state out of both formats of its checkpoints, bit for bit, and the next steps as plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.save_folder import read_config, read_state
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.commands import checkpoint as tool
from megatron_lab.foreign.megatron_source import MOMENTS, MegatronSource
from megatron_lab.foreign.open_source import open_source
from megatron_lab.verification.reference.shape import ReferenceShape, build_random_weights
from tests.support.dist_checkpoints import write_dist
from tests.support.equality import assert_equal_tensors, number_differences
from tests.support.layout import Layout, Recipe, build_step, context_of, microbatches
from tests.support.legacy_checkpoints import LegacyLayout
from tests.support.megatron_states import BATCH, ITERATION, TrainedModel, made_up, trained, write_legacy_run
from tests.support.reference_runs import gpt2_like, llama_like, random_batches, train
from tests.support.runs import checkpoint, saved_tensors
from tests.support.step_checkpoints import load, save
from tests.support.warm import run_warm_ranks

VOCAB = 61
LLAMA = llama_like(num_layers=2, vocab=VOCAB, kv_heads=2)
GPT = gpt2_like(num_layers=2, vocab=VOCAB)  # tied: a copy of the embedding on the last stage
DIST: tuple[dict[str, Any], ...] = (
    {"form": "fully_reshardable"},
    {"form": "fully_reshardable", "names": "halves"},
    {"form": "fully_sharded_model_space"},
    {"form": "fully_sharded_model_space", "names": "own"},
    {"form": "dp_reshardable"},
    {"form": "plain", "names": "own"},
)


def assert_same_state(source: MegatronSource, model: TrainedModel) -> None:
    """Weights as they were, and of the state of the run main parameters and moments; boxes too."""
    assert source.saved_run is not None and source.saved_run.updates == model.updates
    assert set(source.weights) == set(model.weights)
    for name, weight in model.weights.items():
        assert torch.equal(source.read(name), weight), name
        expected = {"model": (model.mains or model.weights)[name], **{kind: model.moments[kind][name] for kind in MOMENTS}}
        for kind, tensor in expected.items():
            whole = TensorSlice.full(tuple(tensor.shape))
            assert torch.equal(source.read_stored(f"{kind}.{name}", whole), tensor), (kind, name)
            if not name.startswith(("embedding", "layers.1.mlp")):
                continue
            part = TensorSlice(
                tuple(size // 3 for size in whole.sizes), tuple(size - size // 3 - size // 4 for size in whole.sizes)
            )
            assert torch.equal(source.read_stored(f"{kind}.{name}", part), tensor[part.index]), (kind, name)
    assert len(source.tensors) == (1 + len(MOMENTS)) * len(model.weights)


PLACES: tuple[tuple[ReferenceShape, LegacyLayout, bool, tuple[int, ...]], ...] = (
    (replace(GPT, num_layers=4), LegacyLayout(2, 2, 2, engine=True), True, (0, 2)),
    (LLAMA, LegacyLayout(2, 1, 1), True, (1, 3, 4)),
    (GPT, LegacyLayout(1, 2, 1), True, (0, 2, 4)),
    (LLAMA, LegacyLayout(2, 2, 1, engine=True), True, (0, 2, 4, 5)),
    (GPT, LegacyLayout(2, 1, 1), False, (5,)),
)
"""Shape, layout, whether there are main parameters, and forms of `DIST`."""


@pytest.mark.parametrize(
    "place", [0, 1, 4, *(pytest.param(place, marks=pytest.mark.full("the forms at the other places")) for place in (2, 3))]
)
def test_state_is_the_same_bits(tmp_path: Path, place: int) -> None:
    """In every form, with main parameters and without."""
    shape, layout, mixed, forms = PLACES[place]
    model = made_up(shape).rounded() if mixed else made_up(shape)
    for sharded in (True, False):
        write_legacy_run(tmp_path / f"legacy-{sharded}", model, layout, sharded=sharded)
    for at in forms:
        write_dist(tmp_path / f"dist-{at}", model, layout, **DIST[at])
    for folder in sorted(tmp_path.iterdir()):
        source = open_source(folder)
        assert isinstance(source, MegatronSource)
        assert_same_state(source, model)


def test_what_import_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, schedules, scale and settings, the same from both formats; and without state on demand."""
    model = made_up(LLAMA).rounded()
    write_legacy_run(tmp_path / "legacy", model, LegacyLayout(2, 2), sharded=True)
    write_dist(tmp_path / "dist", model, LegacyLayout(2, 1))
    for name in ("legacy", "dist"):
        assert tool.main(["import", str(tmp_path / name), str(tmp_path / f"from-{name}")]) == 0
        said = capsys.readouterr().out
        assert "with optimizer state, iteration 3 after 18 samples" in said and f"--load {tmp_path / f'from-{name}'}" in said
        assert "Left out: num_floating_point_operations_so_far, rng_state" in said and "--data-order megatron" in said
        state = read_state(checkpoint(tmp_path / f"from-{name}", ITERATION))
        counts = {"iteration": 3, "consumed_samples": 18, "updated_samples": 12, "skipped_iterations": 1, "phases": []}
        assert state["progress"] == counts and state["optimizer_updates"] == 2 and state["has_optimizer"] is True
        assert state["scaler"] == {"kind": "dynamic", "scale": 4096.0, "clean_steps": 7, "hysteresis_left": 1}
        lengths = {"warmup_samples": 12, "decay_samples": 300, "wsd_decay_samples": 0, "total_samples": 300}
        assert lengths.items() <= state["schedule"]["lengths"].items()
        assert {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "weight_decay": 0.1}.items() <= state["schedule"].items()
        assert state["schedule"]["lr_warmup_init"] == 1e-5 and state["schedule"]["start_weight_decay"] is None
        settings = read_config(checkpoint(tmp_path / f"from-{name}", ITERATION))["config"]
        assert settings["optimizer"]["adam_beta2"] == 0.95 and settings["training"]["seed"] == 77
        assert settings["training"]["global_batch_size"] == BATCH and settings["data"]["data_order"] == "megatron"
    assert tool.main(["diff", str(tmp_path / "from-legacy"), str(tmp_path / "from-dist")]) == 0
    assert tool.main(["import", str(tmp_path / "dist"), str(tmp_path / "weights"), "--weights-only"]) == 0
    assert f"--pretrained-checkpoint {tmp_path / 'weights'}" in capsys.readouterr().out
    assert read_state(checkpoint(tmp_path / "weights", 0)) == {"has_optimizer": False}
    assert set(saved_tensors(tmp_path / "weights", 0)) == set(model.weights)
    write_dist(tmp_path / "none", model, LegacyLayout(), form="none")
    assert tool.main(["import", str(tmp_path / "none"), str(tmp_path / "from-none")]) == 0
    assert "It was saved without optimizer state" in capsys.readouterr().out


# ---- a run goes on

BEFORE, STEPS = 2, 2
SMALL = {"hidden": 24, "ffn": 48, "heads": 4, "kv_heads": 2, "head_size": 6, "vocab": VOCAB, "seq": 8}
LAYOUTS = (Layout(tp=2, dp=2, sharding="optim", micro_batch_size=1), Layout(pp=2, dp=2, sharding="optim_grads", micro_batch_size=1))


def go_on(rank: int, r: Recipe, layout: Layout, folder: Path) -> list[float]:
    """Load what was imported, and make the steps of a recipe."""
    context = context_of(layout, rank)
    step = build_step(context, replace(r, weights={name: one + 1 for name, one in r.weights.items()}), layout)
    load(step, folder, ITERATION)
    assert step.optimizer.num_steps == BEFORE
    losses = []
    for at, batch in enumerate(r.batches):
        inputs = microbatches(batch, context, layout.micro_batch_size)
        losses.append(step.run(inputs, iteration=ITERATION + 1 + at, learning_rate=r.lr, weight_decay=r.weight_decay).loss)
    save(step, folder / "after", ITERATION + STEPS)
    if dist.is_initialized():
        dist.barrier()
    return losses


def test_a_run_goes_on_as_plain_training(tmp_path: Path, full: bool) -> None:
    """In float64, from both formats: the steps behind the import equal those of a plain run that never stopped."""
    shape = llama_like(num_layers=2, **SMALL)
    batches = random_batches(shape, BEFORE + STEPS, BATCH, 1, seed=2)
    model = trained(shape, batches[:BEFORE], 1e-2, 0.1)
    r = Recipe(shape, model.weights, batches[BEFORE:], update={"adam_beta2": 0.95})  # Megatron-LM's betas
    start = train(
        shape, build_random_weights(shape, seed=5), batches, lr=r.lr, weight_decay=r.weight_decay, clip=r.clip, betas=(0.9, 0.95)
    )
    write_legacy_run(tmp_path / "legacy", model, LegacyLayout(2, 2), sharded=True)
    write_dist(tmp_path / "dist", model, LegacyLayout(2, 1), form="fully_sharded_model_space")
    write_dist(tmp_path / "flat", model, LegacyLayout(1, 2), form="dp_reshardable")
    for name, layout in [("legacy", LAYOUTS[0]), ("dist", LAYOUTS[1]), ("flat", LAYOUTS[0])][: 3 if full else 2]:
        assert tool.main(["import", str(tmp_path / name), str(tmp_path / "in" / name)]) == 0
        folder = tmp_path / "in" / name
        ranks = run_warm_ranks(layout.world_size, go_on, r, layout, folder)
        assert not number_differences("losses", ranks[0], start.losses[BEFORE:], 1e-10)
        assert_equal_tensors(saved_tensors(folder / "after", ITERATION + STEPS), start.weights_after, what="weights")


# ---- what is refused


def test_state_that_cannot_be_told_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with what to do; weights alone can be had."""
    model = made_up(GPT).rounded()
    other = replace(model, mains={name: one + 1 for name, one in model.mains.items()})
    cases: list[tuple[str, Any, str]] = [
        (
            "gathered",
            lambda path: write_dist(path, model, LegacyLayout(), form="dp_zero_gather_scatter"),
            "form dp_zero_gather_scatter",
        ),
        (
            "split",
            lambda path: write_dist(path, model, LegacyLayout(), form="dp_reshardable", pipeline_model_parallel_size=2),
            "cannot be determined",
        ),
        ("rule", lambda path: write_dist(path, model, LegacyLayout(), optimizer="muon"), "--optimizer muon"),
        ("decay", lambda path: write_legacy_run(path, model, LegacyLayout(), sharded=False, decoupled_weight_decay=False), "AdamW"),
        (
            "bucket",
            lambda path: write_legacy_run(path, model, LegacyLayout(), sharded=True, ddp_bucket_size=100),
            "elements, but the",
        ),
        ("other", lambda path: write_dist(path, other, LegacyLayout()), "differs from its float32 copy"),
        ("other flat", lambda path: write_dist(path, other, LegacyLayout(), form="dp_reshardable"), "cannot be determined"),
        ("other legacy", lambda path: write_legacy_run(path, other, LegacyLayout(), sharded=True), "differs from its float32 copy"),
        ("old", lambda path: edit_sharded(write_legacy_run(path, model, LegacyLayout(), sharded=True)), "before 0.7"),
    ]
    for name, write, message in cases:
        write(tmp_path / name)
        out = tmp_path / f"{name}-out"
        assert tool.main(["import", str(tmp_path / name), str(out)]) == 1, name
        error = capsys.readouterr().err
        assert message in error and "--weights-only" in error, (name, error)
        assert not out.exists()
        assert tool.main(["import", str(tmp_path / name), str(out), "--weights-only"]) == 0, name
        capsys.readouterr()


def edit_sharded(path: Path) -> None:
    file = path / "mp_rank_00" / "distrib_optim.pt"
    content = torch.load(file, weights_only=True)
    del content["buckets_coalesced"]
    torch.save(content, file)


def test_what_is_missing_or_beyond_the_model_is_listed(tmp_path: Path) -> None:
    model = made_up(GPT).rounded()
    for name, change, message in (
        ("fewer", {"num_layers": 3}, "according to the arguments of the run"),
        ("wider", {"ffn_hidden_size": 80}, r"linear_fc1.weight has the shape \[2, 64, 32\], but .* should be \[2, 80, 32\]"),
        ("experts", {"num_experts": 4}, "num_experts = 4"),
        ("more", {"add_bias_linear": False}, "tensors that the model does not have, .*linear_fc1.bias"),
        ("less", {"qk_layernorm": True}, "lacks the parameter .*q_layernorm"),
    ):
        write_dist(tmp_path / name, model, LegacyLayout(2, 2), **change)
        with pytest.raises(CheckpointError, match=message):
            open_source(tmp_path / name)
    path = write_dist(tmp_path / "file", model, LegacyLayout(2, 2))
    (path / "__1_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="__1_0.distcp is missing"):
        open_source(tmp_path / "file")
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(
        CheckpointError, match="'zarr'; of Megatron-Core's formats only torch_dist[\\s\\S]*--ckpt-format torch_dist"
    ):
        open_source(tmp_path / "file")
