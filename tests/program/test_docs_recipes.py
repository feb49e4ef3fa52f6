"""The recipes in docs/recipes/ do what they say, for a reader who pastes their commands from top to bottom.

Each page runs in a folder that looks like the repository. Blocks under "At full size" need GPUs or a cluster: their settings are
checked for the number of ranks that they start, their scripts and files exist, and the programs of others are known.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from megatron.config.cli import load
from megatron_lab.resilience.launcher_flags import parse_launcher_flags
from tests.program.test_readme import commands, launch, launch_script, step_of_slurm, write_program
from tests.support.cli import ROOT, spawn_cli
from tests.support.warm_python import warm_python

FOLDER = ROOT / "docs/recipes"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "index.md"}
INDEX = (FOLDER / "index.md").read_text()
MAX_LINES = 60
MAX_WIDTH = 100
"""Characters of a command's line, which the site shows without a scroll bar."""
SECTIONS = ("Run it", "What you see", "At full size", "What can go wrong", "More")
OTHER_PROGRAMS = (
    *(
        "docker build",
        "docker push",
        "kubectl logs",
        "kubectl delete",
        "squeue",
        "tail",
        "scancel",
        "vllm serve",
        "hf upload",
        "curl",
    ),
    *("python convert_hf_to_gguf.py", "wandb login", "wandb sync"),
)
"""Programs of others in blocks for clusters."""
_DRY_RUN = "python pretrain_gpt.py --dry-run --train-iters 9 --lr 1e-3 --bf16 --world-size"
_SMALL = "python pretrain_gpt.py --config demo/small.yaml --train-iters 60"
_IMPORTED = "python pretrain_gpt.py --use-checkpoint-args --micro-batch-size 4 --train-iters 3 --lr 1e-3"
WRONG: dict[str, list[str]] = {
    "change_a_run": [
        f"{_SMALL} --load demo/changed/run --lr-decay-style cosine",
        f"{_SMALL} --data-path 50 demo/data_text_document 50 ./demo/data_text_document",
    ],
    "choose_a_layout": [
        "python tools/plan.py --model llama3.2-1b --cluster h200x --gpus 8 --global-batch-size 64",
        f"{_DRY_RUN} 8 --model llama3.2-1b --global-batch-size 60 --micro-batch-size 8",
    ],
    "continue_pretraining": [
        f"{_IMPORTED} --pretrained-checkpoint demo/continue/base --data-path demo/text.jsonl",
        f"{_IMPORTED} --pretrained-checkpoint demo/model --data-path demo/data_text_document",
    ],
    "early_stopping": [f"{_SMALL} --early-stopping-patience 2 --eval-iters 0"],
    "evaluate": [
        "python tools/evaluate.py --load demo/nothing --files demo/text.jsonl",
        "PYTHONPATH=without_lm_eval python tools/evaluate.py --load demo/model --tasks hellaswag",
    ],
    "export_and_serve": [
        "python tools/checkpoint.py export demo/model-run demo/model",
        "python tools/checkpoint.py export demo/nothing demo/other",
    ],
    "fine_tune_chats": [
        f"python tools/preprocess_data.py --input demo/chats.jsonl --output-prefix demo/x --tokenizer-type ByteTokenizer{flag}"
        for flag in ("", " --chat-template")
    ],
    "loss_spike": [f"{_SMALL} --spike-policy rewind", f"{_SMALL} --load demo/spike/run --ckpt-step 30"],
    "move_from_megatron": [
        "python tools/migrate.py missing.sh",
        "sed s/--DDP-impl/--our-own-flag/ demo/train.sh > demo/other.sh; python tools/migrate.py demo/other.sh",
    ],
    "out_of_memory": [f"{_SMALL} --recompute-modules mlp --exit-interval 1"],
    "resume_elsewhere": [
        f"{_SMALL} --nproc 3",
        f"{_SMALL} --load demo/moved/run --num-layers 4",
        f"{_SMALL.replace('60', '9999')} --save demo/moved/run --load demo/moved/run > demo/first.log & first=$!; "
        f"until [[ -e demo/moved/run/run.alive ]]; do sleep 0.05; done; "
        f"{_SMALL} --save demo/moved/run --load demo/moved/run || kill -9 $first",
    ],
    "train_from_scratch": [
        "python tools/train_tokenizer.py --input demo/text.jsonl --kind sentencepiece-bpe --vocab-size 30000 --output demo/x.model",
        f"{_SMALL} --nproc 3 --micro-batch-size 4",
    ],
    "train_on_kubernetes": [
        f"{_DRY_RUN} 56 --model llama2-13b --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 960"
    ],
    "train_on_slurm": ["bash examples/train_16nodes_llama_13b.sh", "NNODES=0 bash examples/train_16nodes_llama_13b.sh"],
    "weights_and_biases": [
        f"{_SMALL} --wandb-exp-name small --exit-interval 1",
        f"PYTHONPATH=without_wandb {_SMALL} --wandb-project demo",
    ],
}
"""Commands that print the messages of a page's section "What can go wrong"."""
HARNESS = """
import json, yaml
from pathlib import Path

class Task:
    def __init__(self, *arguments):
        self.args = arguments

def simple_evaluate(lm, tasks, **_):
    results = {}
    for name in tasks:
        task = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        rows = [json.loads(line) for line in open(task["dataset_kwargs"]["data_files"]["test"])]
        hits = 0
        for row in rows:
            scores = [score for score, _ in lm.loglikelihood([Task(row["text"], choice) for choice in row["choices"]])]
            hits += max(range(len(scores)), key=scores.__getitem__) == row["answer"]
        results[name] = {"alias": name, "acc,none": hits / len(rows)}
    return {"results": results}
"""
"""Stand-in for lm-evaluation-harness: it asks the model the questions of a multiple-choice task."""
TASKS = """
import lm_eval
from pathlib import Path

class TaskManager:
    def __init__(self, include_path):
        lm_eval.FOLDER = Path(include_path)

    def match_tasks(self, names):
        return [name for name in names if (lm_eval.FOLDER / f"{name}.yaml").exists()]
"""
LM = "class LM:\n    def __init__(self):\n        self._rank, self._world_size = 0, 1\n"


def section(page: str, name: str) -> str:
    """Return the text of a section of a page."""
    match = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page}: no section '{name}'"
    return match[1]


def mask(text: str) -> str:
    """Replace digests, names of W&B runs and numbers, which differ from run to run, and join wrapped lines."""
    text = re.sub(r"\b[0-9a-f]{12,}\b|(?<=offline-run-)\d+_\d+-\w{8}\b", "#", text)
    return " ".join(re.sub(r"\d[\d.,:_+-]*(?:e[+-]\d+)?", "#", text).split())


@functools.cache
def demo() -> Path:
    """Return the folder that examples/make_demo.py writes, made once for all pages."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-"))
    atexit.register(shutil.rmtree, folder)
    finished = subprocess.run(
        [warm_python(), str(ROOT / "examples/make_demo.py")], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder like the repository, with the inputs of the recipes, and with stand-ins for torchrun and lm-evaluation-harness."""
    for name in ("pretrain_gpt.py", "tools", "examples", "docs", "megatron", "megatron_lab"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(demo(), tmp_path / "demo")
    programs, packages = tmp_path / "programs", tmp_path / "packages/lm_eval/api"
    programs.mkdir()
    write_program(programs / "torchrun", f'#!/usr/bin/env bash\nexec {warm_python()} -m torch.distributed.run "$@"\n')
    packages.mkdir(parents=True)
    for name in ("wandb", "lm_eval"):
        (tmp_path / f"without_{name}").mkdir()
        (tmp_path / f"without_{name}/{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    for path, text in (("__init__.py", HARNESS), ("tasks.py", TASKS), ("api/__init__.py", ""), ("api/model.py", LM)):
        (packages.parent / path).write_text(text)
    return tmp_path


def bash(script: str, folder: Path) -> tuple[int, str]:
    """Run a script as a reader who pastes it. Returns the exit status and the output."""
    path = [folder / "programs", Path(warm_python()).parent, Path(sys.executable).parent]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("DATA", "NNODES")},
        "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "packages")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",
    }
    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return finished.returncode, finished.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_page_as_it_is_written(page: str, folder: Path) -> None:
    if page in ("continue_pretraining", "fine_tune_chats", "export_and_serve"):
        pytest.importorskip("transformers")
    blocks = re.findall(r"```bash\n(.*?)```", section(page, "Run it"), re.DOTALL)
    status, output = bash("\n".join(blocks), folder)
    assert status == 0, output[-6000:]
    masked = mask(output)
    if page == "weights_and_biases":
        assert len(set(re.findall(r"offline-run-\d+_\d+-(\w{8})\b", output))) == 1, "one run at W&B"
    for line in "\n".join(re.findall(r"```output\n(.*?)```", section(page, "What you see"), re.DOTALL)).splitlines():
        assert mask(line) in masked, f"{line}\n{output[-6000:]}"
        for amount in re.findall(r"needs [\d.]+ GB", line):
            assert amount in output, f"{line}\n{output}"
    for command in WRONG[page]:
        output += bash(f"{command} 2>&1 || true", folder)[1]
    quoted = re.findall(r"^- `([^`]+)`", section(page, "What can go wrong"), re.MULTILINE)
    for message in (one for one in quoted if one != 'no matches for kind "JobSet"' and one != "not calibrated there"):
        assert mask(message) in mask(output), f"{message}\n{output[-6000:]}"


def full_size_commands(page: str) -> list[str]:
    return [*commands(section(page, "At full size"))]


def check_full_size(command: str, folder: Path, full: bool) -> None:
    """Check a command for GPUs or a cluster as far as this machine can."""
    script = next((word for word in command.split() if word.startswith("tools/")), None)
    if command.startswith("srun "):
        step_of_slurm(command, folder, full)
    elif script is not None:
        words = shlex.split(command.partition(script)[2])
        told = spawn_cli([script, *words[: script.endswith("checkpoint.py")], "--help"], nproc=None).stdout
        for word in words:
            flag = word.partition("=")[0]
            assert not flag.startswith("--") or " " in flag or flag in told or script.endswith("plan.py"), f"{script} has no {flag}"
    elif command.startswith("python pretrain_gpt.py ") and "--nproc" not in command:
        load(shlex.split(command)[2:], 1)
    elif command.startswith(("python pretrain_gpt.py ", "torchrun ")):
        launch(command, folder, full)
        if full and "--nproc 8" in command:
            rank_flags = parse_launcher_flags(shlex.split(command)[2:]).flags
            plan = ["pretrain_gpt.py", *rank_flags, "--dry-run", "--world-size", "8", "--device-memory-gb", "80"]
            assert re.search(r"fits a device of 80 GB", spawn_cli(plan, nproc=None).stdout), command
    elif re.search(r"\b(bash|sbatch) ", command) and "examples/" in command:
        variables, _, script_and_flags = command.partition("examples/")
        names = re.findall(r"\w+=\S+", variables)
        launch_script(f"{' '.join(names)} bash examples/{script_and_flags.split()[0]}", folder, full)
    elif command.startswith("kubectl apply -f "):
        assert yaml.safe_load((ROOT / command.split()[-1]).read_text())["kind"] == "JobSet"
    else:
        assert command.startswith(OTHER_PROGRAMS) or "bash demo/" in command, f"no check for: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_for_real_models(page: str, folder: Path, full: bool) -> None:
    subprocess.run(["bash", "-n"], input="\n".join(full_size_commands(page)), text=True, check=True)
    assert full_size_commands(page)
    for command in full_size_commands(page):
        check_full_size(command, folder, full)


def test_the_dry_run_for_kubernetes_has_the_flags_of_the_job() -> None:
    job = yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())
    (node,) = job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"]
    (command,) = commands(section("train_on_kubernetes", "Run it"))
    planned = load([*shlex.split(command)[2:]], 1).config
    flags = node["args"][node["args"].index("pretrain_gpt.py") + 1 :]
    launched = load([*flags, "--dry-run", "--world-size", "128"], 1).config
    assert planned.model == launched.model
    assert planned.parallel == dataclasses.replace(launched.parallel, device=planned.parallel.device)
    assert planned.training.global_batch_size == launched.training.global_batch_size
    for name in ("claimName: training-data", "image: megatron-3d:cuda", "--nnodes=15:16", "--nproc-per-node=8"):
        assert name in (ROOT / "examples/kubernetes/jobset.yaml").read_text() and name in PAGES["train_on_kubernetes"]


@pytest.mark.parametrize("page", PAGES)
def test_the_form_of_a_page(page: str) -> None:
    text = PAGES[page]
    assert len(text.splitlines()) <= MAX_LINES
    assert all(len(line) <= MAX_WIDTH for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines())
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [*SECTIONS]
    assert re.match(r"# .+\n\nUse this recipe (to|if) ", text) and "index.md#before-you-start" in text
    assert [*commands(section(page, "Run it"))] and "```output" in section(page, "What you see")
    problems = re.findall(r"^- .*$", section(page, "What can go wrong"), re.MULTILINE)
    assert 2 <= len(problems) <= 3 and any(problem.startswith("- `") for problem in problems)
    assert "](../" in section(page, "More")


def test_index_and_readme_list_every_page() -> None:
    listed = re.findall(r"\]\((\w+)\.md\)", INDEX)
    assert sorted(listed) == [*PAGES]
    readme = (ROOT / "README.md").read_text().split("## Documentation")[1]
    linked = re.findall(r"\]\(docs/recipes/(\w+)\.md\)", readme)
    assert sorted(linked) == sorted([*PAGES, "index"]), "the README links all recipes"
    assert readme.index("docs/recipes/") < readme.index("docs/launching.md"), "first"
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    (recipes,) = [entry["Recipes"] for entry in nav if "Recipes" in entry]
    assert recipes == ["recipes/index.md", *(f"recipes/{name}.md" for name in listed)], "in the order of the index"
