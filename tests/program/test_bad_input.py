"""Settings that make no sense, given to the whole program: refused in words and with exit code 2, before torch is even imported."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT
from tests.support.rule_cases import argv

_PROGRAM = """
import contextlib, io, json, os, sys
import pretrain_gpt
for line in sys.stdin:
    words, variables = json.loads(line)
    os.environ.update(variables)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = pretrain_gpt.main(words)
    except SystemExit as end:
        code = end.code
    for name in variables:
        del os.environ[name]
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted({"torch", "numpy"} & {*sys.modules})]), flush=True)
"""
"""Runs one command line after the other in an interpreter that has imported nothing else."""


@functools.cache
def program() -> subprocess.Popen[str]:
    """One process for all command lines of this file."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(process.kill)
    return process


def refused(words: list[str], *parts: str, world_size: str | None = None) -> str:
    """Run pretrain_gpt.py as one process of a job and see it refuse. Returns what it says."""
    variables = {} if world_size is None else {"WORLD_SIZE": world_size, "RANK": "0"}
    process = program()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([words, variables]) + "\n")
    process.stdin.flush()
    code, out, said, heavy = json.loads(process.stdout.readline())
    assert (code, out) == (2, ""), said[-2000:]
    assert said.startswith("pretrain_gpt.py: ") and "Traceback" not in said, said[-2000:]
    assert not heavy
    for part in parts:
        assert part in said, said
    return said


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("--bf16 --fp16", ["--fp16 and --bf16 exclude each other"]),
        ("--data-path text", ["--mock-data and --data-path exclude each other"]),
        ("--train-samples 8", ["--train-iters 100 and --train-samples 8 exclude each other"]),
        (
            "--pipeline-model-parallel-layout Et*4L --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zb-v",
            ["exclude each other", "--pipeline-schedule zb-v does not support 1 virtual stage"],
        ),
        (
            "--swiglu --squared-relu --fsdp-shard-size 2 --min-lr 1 --weight-decay-incr-style cosine",
            ["4 problems", "--swiglu", "--fsdp-shard-size 2", "--min-lr 1", "--start-weight-decay"],
        ),
    ],
)
def test_contradictory_flags(extra: str, parts: list[str]) -> None:
    refused(argv(extra), *parts)


NUMBERS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--global-batch-size"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--vocab-size"),
    *("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage", "--make-vocab-size-divisible-by"),
    *("--train-iters", "--ddp-bucket-size", "--decoder-first-pipeline-num-layers", "--fsdp-shard-size", "--ffn-hidden-size"),
)


@pytest.mark.parametrize("value", ["0", "-1", "-9999999999999", f"1{'0' * 400}", "9" * 4000])
def test_sizes_that_are_none(value: str) -> None:
    """All of them at once, and each is named."""
    said = refused(argv(" ".join(f"{flag} {value}" for flag in NUMBERS)))
    assert all(f"{flag} " in said for flag in NUMBERS)


@pytest.mark.parametrize("flag", ["--pipeline-model-parallel-size", "--num-layers", "--global-batch-size", "--hidden-size"])
@pytest.mark.parametrize("value", ["999999999989"])
def test_one_size_that_is_none(flag: str, value: str) -> None:
    refused(argv(f"{flag} {value}"), f"{flag} {value}", world_size="24")


@pytest.mark.parametrize("world_size", ["10000000", "9999991", "9223372036854775807", "0", "-8", "many", ""])
def test_a_world_of_strange_size(world_size: str) -> None:
    """Of a launcher's environment."""
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 3"
    told = f"{int(world_size):,}" if world_size.lstrip("-").isdigit() else "WORLD_SIZE"
    refused(argv(layout), told, world_size=world_size)


@pytest.mark.parametrize("world_size", ["10000000", "0", "-8", "many", "1e3", "9" * 5000])
def test_a_dry_run_of_strange_size(world_size: str) -> None:
    refused(argv(f"--dry-run --world-size {world_size}"), "--world-size", "1,048,576")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"\x7fELF\x02\x01\x01\0\0\0\xff\xfe\xfd", ["cannot be read: it is not text in UTF-8"]),
        (b"PK\x03\x04\0\0\0\0", ["is not valid YAML"]),
        (b"", ["--num-layers is missing"]),
        (b"- num-layers: 4\n- lr: 0.1\n", ["is not a mapping of flag names to values"]),
        (b"just words\n", ["is not a mapping"]),
        (b"num-layers: [4\n", ["is not valid YAML"]),
        (b"model:\n\tnum-layers: 4\n", ["is not valid YAML"]),
        (b"[" * 5000, ["line 1 has more than 20 levels"]),
        (b"a: &a [x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", ["line 2: b is not a setting", "line 3: c"]),
        (b"num-layers: 4\nhiden-size: 8\nmodel:\n  colour: red\n", ["--hidden-size", "line 2", "line 4", "colour is not a flag"]),
        (b"num-layers: {a: 1}\nlr: [[1]]\n", ["line 1: num-layers is not a setting", "line 2: lr is not a setting"]),
        (b"num-layers: four\nlr: true\nbf16: maybe\n", ["line 1", "line 2", "line 3"]),
    ],
    ids=["elf", "zip", "empty", "list", "text", "cut", "tab", "deep", "aliases", "unknown", "shapes", "types"],
)
def test_a_config_file_that_is_none(content: bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    refused(["--config", str(path)], *parts)


@pytest.mark.parametrize("place", ["folder", "missing", "unreadable name"])
def test_a_config_file_that_is_not_there(place: str, tmp_path: Path) -> None:
    path = {"folder": str(tmp_path), "missing": str(tmp_path / "none.yaml"), "unreadable name": "x" * 5000}[place]
    refused(argv(f"--config {path}"), f"--config {path} cannot be read")


def test_unknown_fields() -> None:
    """Those alike are told; words that belong to nothing are named."""
    refused(["stray", *argv("--hiden-size 8 --colour red -lr 3")], "4 problems", "stray", "--hidden-size", "--colour", "-lr")


def test_a_wrong_flag_is_not_hidden_by_missing_ones() -> None:
    """The mistake comes first, and the list of what else is missing is short."""
    said = refused(["--preset", "llama"], "2 problems", "--preset is not a flag", "missing too: --num-layers, --hidden-size, ")
    assert len(said.splitlines()) < 8 and "is missing" not in said


def test_nothing_at_all() -> None:
    """As a program of its own gives it, word for word. One flag is enough for the list of what is missing."""
    refused(["--seed", "1"], "--num-layers is missing", "--data-path is missing", "--lr is missing")
    said = refused([], "bash examples/quickstart.sh", "--model list", "--recipe list", "--help")
    done = subprocess.run([sys.executable, "pretrain_gpt.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
