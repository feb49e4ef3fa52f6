"""What three steps of a plain run import: a run imports what it uses, and optional parts where a flag asks for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.cli import ROOT, command_words
from tests.support.code_lines import count_code_lines

MAX_MODULES, MAX_LINES = 160, 14_200
EXPERTS = "megatron.model.experts"
PLAIN = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3"
).split()


PROGRAM = """
import atexit, json, runpy, sys
words, file = sys.argv[2:], sys.argv[1]
sys.argv = words
def tell():
    json.dump({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}, open(file, "w"))
atexit.register(tell)
runpy.run_path(words[0], run_name="__main__")
"""


def imported(folder: Path, *words: str) -> dict[str, int]:
    """Return the modules of the project that a run on one rank imports, each with its lines of code."""
    file = folder / "modules"
    command = [sys.executable, "-c", PROGRAM, str(file), str(ROOT / "pretrain_gpt.py"), *PLAIN, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = {
        name: path for name, path in json.loads(file.read_text()).items() if name.split(".")[0] in ("megatron", "megatron_lab")
    }
    return {name: count_code_lines(Path(path).read_text()) for name, path in files.items() if path is not None}


def test_a_plain_run_imports_little(tmp_path: Path) -> None:
    found = imported(tmp_path)
    assert len(found) <= MAX_MODULES and sum(found.values()) <= MAX_LINES, sorted(found)
    packages = {".".join(name.split(".")[:2]) for name in found if name.startswith("megatron_lab.")}
    assert packages == {"megatron_lab.monitoring", "megatron_lab.planner"}, "the description of the run, and what it adds up"
    assert "megatron.training.step" in found and EXPERTS not in found
    assert not {name for name in found if name.startswith(("megatron.checkpoint.save", "megatron.checkpoint.load", "megatron.moe"))}


def test_a_part_is_imported_where_a_setting_asks_for_it(tmp_path: Path) -> None:
    words = command_words({"num_experts": 2, "disable_bias_linear": True, "sentinel_interval": 2, "save_trace": tmp_path / "trace"})
    found = imported(tmp_path, *words)
    assert {EXPERTS, "megatron_lab.audit.sentinel", "megatron_lab.audit.callbacks"} <= {*found}


MAX_FILES = 30
STEP = """
import json, sys
from megatron.config.cli import load
from megatron.training.trainer import Trainer
files = set()
def called(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)
with Trainer(load(sys.argv[2:], 1), quiet=True) as trainer:
    trainer.step()
    trainer.step()
    sys.setprofile(called)
    trainer.step()
    sys.setprofile(None)
json.dump(sorted(files), open(sys.argv[1], "w"))
"""


def test_a_step_passes_few_files(tmp_path: Path) -> None:
    """All functions that a plain step calls lie in few files, those of the features that every run has among them."""
    file = tmp_path / "files"
    command = [sys.executable, "-c", STEP, str(file), *PLAIN, "--train-iters", "4", "--num-workers", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = [Path(name).relative_to(ROOT).as_posix() for name in json.loads(file.read_text()) if Path(name).is_relative_to(ROOT)]
    ours = [name for name in parts if name.startswith("megatron")]
    assert {"megatron/training/loop.py", "megatron/pipeline_parallel/executor.py", "megatron_lab/monitoring/goodput.py"} <= {*ours}
    assert len(ours) <= MAX_FILES, ours
