"""Record what a refactoring must not change, in the tree before it, and compare the tree behind it:

    python -m tests.frozen record FOLDER
    python -m tests.frozen compare FOLDER

Recorded are the pages of ``--help`` and ``--explain`` (byte for byte), traces of runs at twenty layouts (bit for bit; so record and
compare on the same machine), checkpoints with the traces of the runs that go on from them at another layout, the ids of all tests
(which may only grow in number), and the syntax trees of all functions. A function that is moved has the same tree but for imports.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = Path(__file__).with_name("layouts.txt")
SOURCES = ("megatron", "megatron_lab", "tools", "pretrain_gpt.py")
"""Folders and files whose functions are recorded, as far as they exist."""
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 1 "
    "--lr 1e-3 --trace-steps 4 --log-interval 1"
).split()
SAVES = {
    "sharded": ("2 --data-parallel-sharding-strategy optim", "2 --tensor-model-parallel-size 2"),
    "fsdp": ("2 --data-parallel-sharding-strategy optim_grads_params --bf16", "1 --bf16"),
    "experts": (
        "1 --num-experts 4 --disable-bias-linear",
        "2 --num-experts 4 --disable-bias-linear --pipeline-model-parallel-size 2",
    ),
    "muon": ("1 --optimizer muon", "2 --optimizer muon --pipeline-model-parallel-size 2"),
}
"""By name a run that saves, and one that goes on from there."""


def main() -> None:
    """Do what the command line says; the exit code is 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.frozen", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=RECORDS, nargs="+", default=[*RECORDS])
    flags = parser.parse_args()
    folder = flags.folder.resolve()
    differs = False
    for name in flags.only:
        if flags.action == "record":
            (folder / name).mkdir(parents=True, exist_ok=True)
        now = RECORDS[name](folder / name, flags.action == "record")
        file = folder / name / "record.json"
        if flags.action == "record":
            file.write_text(json.dumps(now, indent=1))
            print(f"{name}: {len(now)} recorded", flush=True)
            continue
        problems = COMPARISONS.get(name, differences)(json.loads(file.read_text()), now)
        print(f"{name}: " + (f"{len(problems)} differ" if problems else f"{len(now)} as recorded"), flush=True)
        for problem in problems:
            print(f"  {problem}")
        differs |= bool(problems) and name != "functions"
    sys.exit(differs)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not as it was."""
    return [f"{name}: {'missing' if name not in now else 'other'}" for name, value in before.items() if now.get(name) != value] + [
        f"{name}: new" for name in now if name not in before
    ]


def program(words: Sequence[str], **environment: str) -> str:
    """Run Python on this tree; returns its standard output."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "PYTHONHASHSEED": "0",
        **environment,
    }
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def pages(folder: Path, is_record: bool) -> dict[str, str]:
    """The page of --help all, and that of --explain for every flag."""
    every = (
        "import json; from megatron.config.flags import get_flags; from megatron.config.parsed_flags import REQUESTS;"
        "from megatron.config.compat import COMPAT_FLAGS, TRANSLATIONS; from megatron.config.help import explain;"
        "print(json.dumps({name: explain(name) for name in [*get_flags(), *REQUESTS, *COMPAT_FLAGS, *TRANSLATIONS]}))"
    )
    return {"--help": program(["pretrain_gpt.py", "--help", "all"]), **json.loads(program(["-c", every]))}


def run(line: str, *more: str | Path) -> None:
    """Train with flags that begin with the number of ranks."""
    ranks, *words = line.split()
    launcher = [] if ranks == "1" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    program([*launcher, "pretrain_gpt.py", *MODEL, *words, *map(str, more)])


def trace_of(line: str, file: Path, *more: str | Path) -> str:
    """The trace of a run: all numbers of its steps, and fingerprints of its gradients and weights."""
    file.unlink(missing_ok=True)
    run(line, "--save-trace", file, *more)
    content = file.read_bytes()
    file.unlink()
    records = [json.loads(row) for row in content.splitlines()]
    for record in records:
        for name in ("settings", "torch"):
            record.pop(name, None)
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def traces(folder: Path, is_record: bool) -> dict[str, str]:
    """Those of the layouts in `layouts.txt`."""
    lines = [line for line in LAYOUTS.read_text().splitlines() if not line.startswith("#")]
    return {line: trace_of(line, folder / "trace") for line in lines}


def checkpoints(folder: Path, is_record: bool) -> dict[str, str]:
    """Traces of runs that go on from the checkpoints of the recorded tree."""
    found = {}
    for name, (first, second) in SAVES.items():
        if is_record:
            shutil.rmtree(folder / name, ignore_errors=True)
            run(first, "--exit-interval", "2", "--save", folder / name)
        found[name] = trace_of(second, folder / "trace", "--load", folder / name)
    return found


def tests(folder: Path, is_record: bool) -> dict[str, str]:
    """The ids of all tests."""
    listed = program(["-m", "pytest", "-n", "0", "--collect-only", "-q", "-p", "no:cacheprovider"])
    return {line: "" for line in listed.splitlines() if "::" in line}


def lost(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names that are not there any more."""
    return [name for name in before if name not in now]


def functions(folder: Path, is_record: bool) -> dict[str, int]:
    """How often each function occurs, by its name and the hash of its tree without imports and docstrings."""
    found: Counter[str] = Counter()
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.exists():
                found.update(f"{name} {digest}" for name, digest in _functions(ast.parse(file.read_text()), ""))
    return dict(found)


def _functions(tree: ast.AST, within: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(tree):
        name = f"{within}{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) else within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, hashlib.sha256(ast.dump(_Bare().visit(child)).encode()).hexdigest()[:16]
        else:
            yield from _functions(child, name if name == within else f"{name}.")


class _Bare(ast.NodeTransformer):
    """Drops imports and docstrings."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else self.generic_visit(node)


def changed_functions(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Functions that are not there any more with the same tree."""
    return [name for name, count in before.items() if now.get(name, 0) < count]


RECORDS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "pages": pages,
    "functions": functions,
    "tests": tests,
    "checkpoints": checkpoints,
    "traces": traces,
}
COMPARISONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], list[str]]] = {"tests": lost, "functions": changed_functions}

if __name__ == "__main__":
    main()
