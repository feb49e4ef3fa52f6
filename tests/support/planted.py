"""`tools/verify_layout.py` with a fault planted in the source."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.verification.prove import import_before_fork
from tests.support.faults import FaultyFunction, Replaced, faulty_functions, planted
from tests.support.warm import RankPool
from tools import verify_layout

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 "
    "--train-iters 100 --eval-iters 1 --data-path /nowhere/corpus --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 8"
)
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5 --moe-ffn-hidden-size 32"
_RANKS = RankPool()
"""Apart from those of other tests: a fault may leave something behind."""


@dataclass(frozen=True)
class Fault:
    """Texts that are replaced in the source, and what the first finding then is."""

    replaced: tuple[Replaced, ...]
    flags: str
    kind: str
    place: str
    group: str | None
    says: tuple[str, ...]
    """In the verdict."""
    step: int = 1
    stages: tuple[int, ...] | None = None


def verify(tmp_path: Path, replaced: Sequence[Replaced], flags: str, *own: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what is printed, and the JSON of the tool, which runs in this process and on ranks that stay."""
    import_before_fork()
    found, faulty = tmp_path / "found.json", faulty_functions(replaced)
    argv = [*shlex.split(FLAGS), *shlex.split(flags), *own, "--json", str(found)]

    def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float, init: bool = True) -> list[Any]:
        """Run in place of `run_ranks`; the reference runs in this process."""
        return _RANKS.run(world_size, _with_faults, faulty, function, args, timeout=timeout) if init else [function(0, *args)]

    with (
        planted(faulty),
        patch("megatron.verification.prove.run_ranks", run),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        status = verify_layout.main(argv)
    assert found.exists(), said.getvalue()
    return status, said.getvalue(), json.loads(found.read_text())


def _with_faults(rank: int, faulty: Sequence[FaultyFunction], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A rank's call of a function."""
    with planted(faulty):
        return function(rank, *args)


def assert_found(fault: Fault, tmp_path: Path) -> None:
    """The tool finds the fault, and names its place."""
    status, text, found = verify(tmp_path, fault.replaced, fault.flags, "--quick", "--steps", str(max(1, fault.step)))
    assert status == 1, text
    assert not found["equal"], text
    verdict, first = text.splitlines()[0], next(run["findings"][0] for run in found["runs"] if run["findings"])
    assert verdict.startswith("DIFFERENT"), text
    assert (first["kind"], first["step"], first["group"]) == (fault.kind, fault.step, fault.group), text
    assert fault.place in verdict and all(words in verdict for words in fault.says), text
    assert fault.stages is None or tuple(first["stages"]) == fault.stages, text
