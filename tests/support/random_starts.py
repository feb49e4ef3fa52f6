"""A random command line as a user runs it: pretrain_gpt.py on made-up data in its number format, beside one float64 process."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import megatron.planner.dry_run  # once here, not in every forked rank
import megatron.planner.plan
import megatron.planner.plan_text  # noqa: F401
from megatron.config.config import Config
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.save import to_yaml
from megatron.parallel.topology import Topology
from tests.support.random_configs import CommandLine
from tests.support.runs import read_metrics, run

_BANDS = {"fp64": 1e-9, "fp16": 0.02, "bf16": 0.04, "": 1e-4}
"""Relative difference of the first loss from that in float64."""


def start(line: CommandLine, config: Config, timeout: float) -> None:
    """Run the whole program at the layout and in one process, and compare what it says.

    Args:
        config: what the command line says.

    Raises:
        AssertionError: a rank failed or hung, a loss is not finite, or the first one is too far from that of one process.
    """
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        run([*line.argv, "--metrics-file", str(folder / "layout")], line.world_size, timeout=timeout)
        plain = folder / "plain.yaml"
        plain.write_text(to_yaml(in_one_process(config, line.world_size)))
        run(["--config", str(plain), "--metrics-file", str(folder / "plain")], timeout=timeout)
        found, wanted = _losses(folder / "layout"), _losses(folder / "plain")
    precision, model = config.precision, config.model
    kind = next((kind for kind in ("fp64", "fp16", "bf16") if getattr(precision, kind)), "")
    # In float16 a step may be left out, because its gradient overflowed.
    assert found.keys() <= wanted.keys() and (kind == "fp16" or len(found) == len(wanted)), (found, wanted)
    assert all(map(math.isfinite, found.values())), found
    if model.attention_dropout or model.hidden_dropout:
        return
    # A later loss depends on updates, which rounding may turn round; in float64 all are the same.
    for iteration in found.keys() & (wanted if kind == "fp64" else list(wanted)[:1]):
        far = abs(found[iteration] - wanted[iteration]) / wanted[iteration]
        assert far <= _BANDS[kind], f"iteration {iteration}: loss {found[iteration]!r}, in one process {wanted[iteration]!r}"


def rehearse(line: CommandLine) -> None:
    """Lay the run out without running it.

    Raises:
        AssertionError: that failed.
    """
    said = run([*line.argv, "--dry-run", "--world-size", str(line.world_size)])
    assert f"{line.world_size} rank" in said.replace(",", ""), said


def in_one_process(config: Config, world_size: int) -> Config:
    """The same training without a layout, in float64."""
    parallel, training = config.parallel, config.training
    data_size = Topology.of(parallel, world_size).dp
    batch = training.global_batch_size or training.micro_batch_size * data_size
    precision = PrecisionConfig(fp64=True)
    if config.precision.fp8_format is not None:
        precision = dataclasses.replace(config.precision, bf16=False, fp64=True)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(training, global_batch_size=batch),
        parallel=ParallelConfig(device="cpu"),
        memory=dataclasses.replace(config.memory, recompute_layers_per_stage=None),
        precision=precision,
        optimizer=dataclasses.replace(config.optimizer, optimizer_cpu_offload=False, optimizer_offload_fraction=1.0),
    )


def _losses(path: Path) -> dict[int, float]:
    """Training loss of each iteration that made a step."""
    return {line["iteration"]: line["lm_loss"] for line in read_metrics(path) if "lm_loss" in line}
