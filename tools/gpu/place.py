"""What a check works with: a device, a folder, and runs of the project's programs there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu.isolated import ROOT

Flags = Mapping[str, Any]
TINY: Flags = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-2,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 60,
    "num_workers": 0,
    "eval_iters": 0,
    "log_interval": 1,
    "train_iters": 4,
}
LLAMA: Flags = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


class Failure(Exception):
    """What must be true is not; in words, with figures."""


class Unfit(Exception):
    """The device is too small for it."""


def words(flags: Flags) -> list[str]:
    """The command line of flags by the names of their fields."""
    line: list[str] = []
    for name, value in flags.items():
        if value is not None and value is not False:
            line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return line


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: str
    folder: Path

    @property
    def on_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device == "cuda"

    def start(self, ranks: int = 1, **flags: Any) -> list[subprocess.Popen[str]]:
        """Start pretrain_gpt.py: `TINY` with changes. Several ranks share one device and speak over gloo."""
        shared = {"distributed_backend": "gloo"} if ranks > 1 else {}
        line = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words({**TINY, "device": self.device, **shared, **flags})]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        started = []
        for rank in range(ranks):
            job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            env = {**os.environ, **{name: str(value) for name, value in job.items()}, "MASTER_ADDR": "127.0.0.1"}
            env |= {"CUDA_VISIBLE_DEVICES": first} if ranks > 1 else {}
            log = (self.folder / f"log-{port}-{rank}").open("w+")
            started.append(subprocess.Popen(line, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, text=True))
            started[-1].log = log  # type: ignore[attr-defined]
        return started

    def pretrain(self, ranks: int = 1, **flags: Any) -> str:
        """Run it to its end; returns what the first rank said.

        Raises:
            Failure: a rank failed.
        """
        started = self.start(ranks, **flags)
        codes = [process.wait() for process in started]
        texts = [said(process) for process in started]
        for code, text in zip(codes, texts, strict=True):
            if code:
                raise Failure(f"pretrain_gpt.py {' '.join(words(flags))} ended with {code}: {last_words(text)}")
        return texts[0]

    def trace(self, name: str, ranks: int = 1, **flags: Any) -> Path:
        """A run in float64 unless told otherwise; returns its trace."""
        file = self.folder / name
        self.pretrain(ranks, **{"fp64": True, "save_trace": file, "trace_steps": 4, **flags})
        return file

    def losses(self, name: str, ranks: int = 1, **flags: Any) -> list[float]:
        """The loss of every step of a run."""
        self.pretrain(ranks, **{"metrics_file": self.folder / name, **flags})
        return [one["lm_loss"] for one in self.metrics(name) if "lm_loss" in one]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines of a metrics file."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def said(process: subprocess.Popen[str]) -> str:
    """What a started process has printed so far."""
    return Path(process.log.name).read_text(errors="replace")  # type: ignore[attr-defined]


def last_words(text: str) -> str:
    """The end of an output, which has the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:] or "it said nothing"


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """The greatest difference of two curves.

    Raises:
        Failure: one is longer than the other.
    """
    if len(losses) != len(others):
        raise Failure(f"one run has {len(losses)} losses, the other {len(others)}")
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def within(found: float, allowed: float, what: str) -> str:
    """The figure.

    Raises:
        Failure: it is more than allowed, or not a number.
    """
    told = f"{what} {found:.1e} (allowed {allowed:.0e})"
    if not found <= allowed:
        raise Failure(told)
    return told
