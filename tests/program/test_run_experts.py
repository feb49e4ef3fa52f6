"""Runs of models with experts: the log, and a checkpoint that goes on at any layout of the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lab.commands.checkpoint import main
from tests.support.checkpoint_worlds import read_manifest
from tests.support.equality import number_differences
from tests.support.runs import arguments, checkpoint, digest, read_metrics, run, timeless

STEPS, STOP = 3, 1
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "fp64": True,
    "train_iters": STEPS,
    "disable_bias_linear": True,
    "swiglu": True,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "num_experts": 4,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_expert_capacity_factor": 1.25,
    "eval_iters": 1,
    "eval_interval": 3,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert_model_parallel_size": 2}),
    "expert 4, pipeline 2": (8, {"expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2}),
    "expert tensor 1 beside tensor 2": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "pipeline 2": (2, {"pipeline_model_parallel_size": 2}),
    "context 2, gathered": (
        2,
        {"context_parallel_size": 2, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
    ),
    "sharded in two copies, compared": (
        4,
        {"data_parallel_sharding_strategy": "optim_grads_params", "fsdp_shard_size": 2, "check_replicas_every": 1},
    ),
    "sharded in two copies, compared, expert 2": (
        4,
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "fsdp_shard_size": 2,
            "check_replicas_every": 1,
            "expert_model_parallel_size": 2,
        },
    ),
    "sharded": (4, {"data_parallel_sharding_strategy": "optim_grads_params", "expert_model_parallel_size": 2}),
}
QUICK = ("expert tensor 1 beside tensor 2",)
"""Others: tests/proof/test_checkpoint_layouts.py, test_sharding_resume.py and test_layouts_experts.py."""
NUMBERS = ("lm_loss", "grad_norm", "load_balancing_loss", "moe_z_loss", "busiest_expert", "dropped_share", "validation_loss")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("one")
    said = run(arguments(**SETTINGS, save=folder, save_interval=STOP, metrics_file=folder / "metrics"))
    assert "| load_balancing_loss: 1.0" in said and "| router z loss: 1." in said and "| busiest expert: 1." in said
    return folder


def numbers(path: Path) -> list[float]:
    """What is logged behind the stop."""
    lines = [line for line in read_metrics(path) if line["iteration"] > STOP]
    found = [line[name] for line in lines for name in NUMBERS if name in line]
    assert len(found) == (STEPS - STOP) * 6 + 1
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS if metafunc.config.getoption("--full") else QUICK)


def test_a_checkpoint_goes_on_at_any_layout_of_the_experts(one: Path, tmp_path: Path, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    run(arguments(**SETTINGS, **flags, load=one, ckpt_step=STOP, metrics_file=tmp_path / "metrics"), ranks)
    assert not number_differences(layout, numbers(tmp_path / "metrics"), numbers(one / "metrics"), 1e-10)


@pytest.mark.full("test_run_resume.py::test_a_resumed_run_is_the_same_bit_for_bit")
def test_and_at_the_same_bit_for_bit(tmp_path: Path) -> None:
    """In bfloat16, with recompute and noise on the routers' inputs; what each layer's experts get is in the metrics file."""
    settings = (
        SETTINGS
        | {"fp64": False, "bf16": True, "global_batch_size": 4, "recompute_granularity": "full", "moe_input_jitter_eps": 0.01}
        | LAYOUTS["expert 2"][1]
    )
    run(arguments(**settings, save=tmp_path / "whole", save_interval=STOP, metrics_file=tmp_path / "whole.jsonl"), 2)
    again = {"load": tmp_path / "whole", "ckpt_step": STOP, "save": tmp_path / "again", "metrics_file": tmp_path / "again.jsonl"}
    run(arguments(**settings, **again), 2)
    lines = timeless(tmp_path / "whole.jsonl")
    assert timeless(tmp_path / "again.jsonl") == [line for line in lines if line["iteration"] > STOP]
    assert digest(tmp_path / "again", STEPS) == digest(tmp_path / "whole", STEPS)
    assert {"busiest_expert/layers.0", "busiest_expert/layers.1"} <= lines[0].keys()


def test_files_are_cut_as_the_ranks_hold_experts(one: Path, tmp_path: Path) -> None:
    """`tools/checkpoint.py reshard`: experts of several data ranks, each box once, with the same content; a run goes on from it."""
    assert main(["reshard", str(one), str(tmp_path / "cut"), *"--tp 2 --ep 4 --etp 1".split()]) == 0
    whole, cut = (read_manifest(checkpoint(folder, STEPS)) for folder in (one, tmp_path / "cut"))
    assert cut.content_digest == whole.content_digest
    boxes = cut.tensors["model.layers.1.mlp.experts.down.weight"].slices
    assert [(box.tensor_slice.offsets, box.tensor_slice.sizes, box.file) for box in boxes] == [
        ((expert, 0, 0), (1, 32, 48), f"rank_{expert:05d}.safetensors") for expert in range(4)
    ]
    assert {box.file for box in cut.tensors["model.layers.1.attention.qkv.weight"].slices} == {boxes[0].file, boxes[1].file}
