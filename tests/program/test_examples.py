"""The launch scripts: settings that are valid and fit, memory as they state it, starts, checks, restarts and stops."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.save_folder import LATEST
from megatron.config.cli import load
from megatron.config.model_files import get_launch_command, list_models
from megatron.data.tokenizer import predict_embedding_rows
from megatron_lab.planner.dry_run import build_plan
from megatron_lab.planner.plan import plan_to_json
from tests.support.cli import ROOT
from tests.support.launched import EXAMPLES, SCRIPTS, Started, environment, flag, header, slurm_options, start, words_of
from tests.support.supervised import writers_to
from tests.support.warm_python import warm_python

SINGLE, MULTI = "train_8gpu_llama_7b.sh", "train_16nodes_llama_13b.sh"
GPU, UNITS = 80e9, {"MB": 1e6, "GB": 1e9}
RANKS = {
    "cpu_laptop": 2,
    "1gpu_gpt_125m": 1,
    "1gpu_gpt_1_3b": 1,
    "8gpu_llama_7b": 8,
    "8gpu_qwen3_30b_a3b": 8,
    "16nodes_llama_13b": 128,
    "16nodes_llama_70b": 128,
    "16nodes_long_llama_70b": 128,
    "extend_context_llama_8b": 32,
    "256gpu_deepseek_v3": 256,
    "1024gpu_gpt_175b": 1024,
    "3072gpu_gpt_1t": 3072,
}
PARAMETERS = {
    "125m": 125e6,
    "1_3b": 1.3e9,
    "7b": 6.74e9,
    "8b": 8.03e9,
    "30b_a3b": 30.53e9,
    "13b": 13.0e9,
    "long_llama_70b": 70.6e9,
    "70b": 69.0e9,
    "deepseek_v3": 671e9 + 11.6e9,
    "175b": 174.6e9,
    "1t": 1008e9,
}
"""As published; by the end of the script's name. DeepSeek-V3's has a depth beside the 671 billion."""


def test_there_is_a_script_for_every_size() -> None:
    assert {_name(script) for script in SCRIPTS} == set(RANKS)


def _name(script: str) -> str:
    return script.removeprefix("train_").removesuffix(".sh")


# ---- settings


PLANNED_IN_FULL = {
    "train_3072gpu_gpt_1t.sh": "train_16nodes_llama_13b.sh has the same settings with other sizes",
    "train_16nodes_long_llama_70b.sh": "test_dry_run.py plans a job that shares sequences",
    "extend_context_llama_8b.sh": "the same",
    "train_256gpu_deepseek_v3.sh": "train_8gpu_qwen3_30b_a3b.sh has experts too, and tests/proof/test_planner_experts.py",
    "train_1024gpu_gpt_175b.sh": "train_16nodes_llama_13b.sh has the same settings with other sizes",
    "train_16nodes_llama_70b.sh": "test_readme.py has its dry run",
}
"""Scripts whose plan takes a second or more and that --full plans; and what the normal run has instead."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_dry_run_is_as_the_script_states(script: str, tmp_path: Path, full: bool) -> None:
    """Its own words are accepted, none of them without effect; and the job fits."""
    program, *words = words_of(script, folder=tmp_path)
    loaded = load(words, 1)
    assert Path(program).resolve() == ROOT / "pretrain_gpt.py" and loaded.dry_run is not None
    assert loaded.notes == () and loaded.dry_run.world_size == RANKS[_name(script)]
    if script in PLANNED_IN_FULL and not full:
        tokens = (loaded.config.training.global_batch_size or 0) * loaded.config.model.seq_length
        assert header(script)["tokens per step"] == f"{tokens:,}"
        return
    plan = plan_to_json(build_plan(loaded.config, loaded.dry_run, predict_embedding_rows(loaded.config.data)))
    stated = header(script)
    on_cpu = flag(words, "--device") == "cpu"
    number, unit = stated.pop(f"memory per {'process' if on_cpu else 'GPU'}").split()
    assert float(number) * UNITS[unit] == pytest.approx(plan["device_bytes"], rel=0.01)
    assert stated == {
        "tokens per step": f"{plan['tokens_per_step']:,}",
        "pipeline idle": f"{100 * plan['pipeline']['bubble_share']:.1f} %",
    }
    assert plan["device_bytes"] < 0.9 * GPU and plan["pipeline"]["bubble_share"] < 0.2
    if not on_cpu:
        published = next(size for name, size in PARAMETERS.items() if script.endswith(f"_{name}.sh"))
        assert plan["model"]["parameters"] == pytest.approx(published, rel=0.02)
        assert plan["job"]["tensor"] <= plan["job"]["gpus_per_node"] <= 8


def test_a_model_fits_the_script_that_it_names(tmp_path: Path, full: bool) -> None:
    """Its own of the scripts are tried above; of the others, those that no other plan is as large as. In the normal run two."""
    for name in ("llama3-8b", "llama3.2-1b", *(("gemma2-9b", "llama3-405b") if full else ())):
        script, *changes = get_launch_command(name)
        _, *words = words_of(script, *changes, folder=tmp_path, MODEL=name)
        loaded = load(words, 1)
        assert loaded.dry_run is not None and flag(words, "--model") == name
        assert all("comes later" in note for note in loaded.notes), loaded.notes
        plan = plan_to_json(build_plan(loaded.config, loaded.dry_run, predict_embedding_rows(loaded.config.data)))
        assert plan["device_bytes"] < 0.95 * GPU, name
    assert {get_launch_command(name)[0] for name in list_models()} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_sound_bash(script: str) -> None:
    """Stops at the first error, and leaves everything else to the shared file."""
    text = (EXAMPLES / script).read_text()
    for file in (script, "launch.sh", "launch_node.sh"):
        subprocess.run(["bash", "-n", str(EXAMPLES / file)], check=True)
        assert not [line for line in (EXAMPLES / file).read_text().splitlines() if len(line) > 132 or line != line.rstrip()], file
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.startswith("#!/usr/bin/env bash\n") and code[0] == "set -euo pipefail"
    assert re.fullmatch(r'launch \d+ \d [\w.-]+ "\$@"', code[-1]) and "torchrun" not in text


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:b"}, {"PYTORCH_CUDA_ALLOC_CONF": "c:d"}])
def test_segments_of_device_memory_can_grow(given: dict[str, str], tmp_path: Path) -> None:
    """Unless the user has set the allocator, by either name."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${PYTORCH_ALLOC_CONF-} ${PYTORCH_CUDA_ALLOC_CONF-}"\n')
    python.chmod(0o755)
    unset = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "")
    words = ["bash", str(EXAMPLES / "launch_node.sh"), "1", "1", "localhost:1", "name", str(python), "program"]
    done = subprocess.run(words, env=environment(**unset | given), capture_output=True, text=True, check=True)
    new, old = given.get("PYTORCH_ALLOC_CONF"), given.get("PYTORCH_CUDA_ALLOC_CONF")
    assert done.stdout.strip() == (new or old or "expandable_segments:True")


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_kept_whole(script: str, tmp_path: Path) -> None:
    """A path with spaces and stars is one word; flags behind the name count instead of the script's."""
    path = "my data/a * b"
    assert flag(words_of(script, "--save", path, folder=tmp_path), "--save") == path
    given = {"RUN": path, "DATA": path, "TOKENIZER": path, "VOCAB": path, "MERGES": path}
    python = tmp_path / "echo-words"  # as `words_of` left it
    done = subprocess.run(
        ["bash", str(EXAMPLES / script)],
        env=environment(DRY_RUN="1", PYTHON=str(python), **given),
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")
    assert flag(words, "--load") == f"{path}/checkpoints" == flag(words, "--save")
    assert path in words and not any(word.endswith("data/a") for word in words)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if slurm_options(script)])
def test_what_slurm_is_asked_for(script: str, tmp_path: Path) -> None:
    """As many nodes as the settings are for, one task on each, a signal in time, and a second start."""
    options, words = slurm_options(script), words_of(script, folder=tmp_path)
    assert int(options["nodes"]) * int(flag(words, "--gpus-per-node")) == int(flag(words, "--world-size"))
    assert options["gpus-per-node"] == flag(words, "--gpus-per-node") and options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("B:USR1@") and {"requeue", "exclusive", "time"} <= set(options)
    assert options["open-mode"] == "append"
    lines = (EXAMPLES / script).read_text().splitlines()
    assert all(line.startswith("#") for line in lines[: max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))])


def test_jobs_of_several_nodes_are_for_slurm() -> None:
    assert {_name(script) for script in SCRIPTS if slurm_options(script)} == {name for name, ranks in RANKS.items() if ranks > 8}


# ---- what is missing or wrong


def tried(script: str, *added: str, **variables: str) -> tuple[int, str]:
    """Exit status and words of a script that does not get far, with the real Python."""
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *added],
        env=environment(PYTHON=sys.executable, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "laptop" not in script])
def test_missing_variables_are_told_in_words(script: str) -> None:
    assert tried(script)[0] == 2
    assert re.match(
        rf"{script}: DATA is not set: the prefix of a dataset, as tools/preprocess_data\.py writes it", tried(script)[1]
    )


def test_the_laptop_needs_a_tokenizer_with_data() -> None:
    status, said = tried("train_cpu_laptop.sh", DATA="text")
    assert status == 2 and said.startswith("train_cpu_laptop.sh: TOKENIZER is not set: the sentencepiece model")


def test_several_nodes_need_a_head() -> None:
    status, said = tried(MULTI, DATA="text")
    assert status == 2 and "HEAD is not set: the name or address of one of the 16 nodes, the same on all of them" in said
    assert "HEAD" in tried(SINGLE, DATA="text", NNODES="2")[1]


def test_numbers_that_are_none_are_told_in_words(tmp_path: Path) -> None:
    """Together, also for a dry run, before bash takes them for names of variables or for programs."""
    status, said = tried(MULTI, DRY_RUN="1", NNODES="abc", PORT="65535", MAX_RESTARTS=f"a[$(touch {tmp_path}/ran)]")
    assert status == 2 and not list(tmp_path.iterdir()), said
    for words in (
        "NNODES must be a whole number from 1 to 1000000, but is 'abc'",
        "PORT must be a whole number from 1 to 65534, but is '65535'",
        "MAX_RESTARTS must be a whole number from 0 to 1000000, but is 'a[",
    ):
        assert words in said, said
    for wrong in ("0", "08", "-1", "1e3", "9" * 20):
        assert tried(SINGLE, NNODES=wrong)[1].startswith(f"{SINGLE}: NNODES must be a whole number"), wrong


def test_wrong_settings_end_at_once_with_2(tmp_path: Path) -> None:
    """Every problem in words, before anything is started."""
    status, said = tried(SINGLE, "--num-attention-heads", "31", "--lr", "-1", DATA="text", RUN=str(tmp_path / "run"))
    assert status == 2 and "--num-attention-heads 31" in said and "--lr -1" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_is_the_header(script: str) -> None:
    done = subprocess.run(["bash", str(EXAMPLES / script), "--help"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert f"examples/{script}" in done.stdout and "SBATCH" not in done.stdout and "set -e" not in done.stdout
    assert any(line.startswith("Result of the dry run") for line in lines) and lines[-1].startswith("  pipeline idle")


def bare(folder: Path, script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a shell that knows nothing of the project, in another folder."""
    return subprocess.run(
        ["bash", str(script)],
        env={"PATH": "/usr/bin:/bin"} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the scripts, in a folder with a blank in its name, without an environment."""
    for name in ("examples", "tools"):
        (tmp_path / "a tree" / name).mkdir(parents=True)
        for path in (ROOT / name).glob("*.sh"):
            shutil.copy(path, tmp_path / "a tree" / name)
    return tmp_path / "a tree"


def test_scripts_find_the_environment_of_the_project(tree: Path, tmp_path: Path) -> None:
    """From any shell, in any folder; where there is none, one line says how to make it. PYTHON counts before all."""
    script, python = tree / "examples" / SINGLE, tree / ".venv/bin/python"
    none = bare(tmp_path, script, DRY_RUN="1", PATH=str(bare_path(tmp_path)))
    assert none.returncode == 2 and none.stdout == "" and none.stderr.count("\n") == 1
    assert f"Create an environment: bash {tree}/tools/setup_env.sh (or select a Python: PYTHON=" in none.stderr
    python.parent.mkdir(parents=True)
    for path in (python, tmp_path / "mine"):
        path.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$0 $*"\n')
        path.chmod(0o755)
    started = f"{tree}/pretrain_gpt.py "
    assert bare(tmp_path, script, DRY_RUN="1").stdout.startswith(f"{python} {started}")
    assert bare(tmp_path, script, DRY_RUN="1", PYTHON=str(tmp_path / "mine")).stdout.startswith(f"{tmp_path}/mine {started}")


def bare_path(folder: Path) -> Path:
    """A folder for PATH that has what bash scripts need, and no Python."""
    place = folder / "path"
    place.mkdir()
    for name in ("bash", "dirname", "cat", "awk", "sed"):
        (place / name).symlink_to(shutil.which(name) or "")
    return place


# ---- starts, with stand-ins for Python and Slurm

SAVES = f'echo 5 > "$CHECKPOINTS/{LATEST}"\n'
RANK = f"""
import os, signal, sys, time
def stop(*_):
    if {{saves}}:
        open(os.environ["CHECKPOINTS"] + "/{LATEST}", "w").write("7")
    os._exit(0)
signal.signal(signal.SIGTERM, stop if {{hears}} else signal.SIG_IGN)
open(os.environ["NOTES"], "a").write("rank is up\\n")
time.sleep(60)
"""


def waiting(saves: bool = True, hears: bool = True) -> str:
    """A supervisor with one rank that waits for SIGTERM; on the second it ends the rank and itself."""
    rank = f"{sys.executable} -S -c '{RANK.format(saves=saves, hears=hears)}' &\nrank=$! stops=0\n"
    stop = "trap 'stops=$((stops + 1)); kill -TERM $rank; ((stops < 2)) || { kill -KILL $rank; exit 3; }' TERM\n"
    return rank + stop + "until wait $rank; (($? < 128)); do :; done\n"


def start_in_slurm(folder: Path, training: str, **variables: str) -> Started:
    """As sbatch starts it: a copy of the script, elsewhere, under another name."""
    folder.mkdir(exist_ok=True)
    copy = folder / "slurm_script"
    shutil.copy(EXAMPLES / MULTI, copy)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    return start(copy, folder, training, **{**slurm, **variables})


def test_a_start_on_one_node(tmp_path: Path) -> None:
    started = start(EXAMPLES / SINGLE, tmp_path, SAVES, "--lr", "1e-4", MAX_RESTARTS="5")
    assert started.ended() == (0, "")
    plan, _, check, supervisor = started.noted("")
    assert "--dry-run --world-size 8 --gpus-per-node 8 --dry-run-json" in plan
    assert re.search(r"check_cluster\.py --nodes 1 --ranks-per-node 8 --head localhost:29501 .*--device-bytes 1234 -- ", check)
    assert supervisor.startswith("-m megatron_lab.resilience.supervisor --elastic 8:8 --nproc-per-node 8 --max-restarts 5 ")
    for line in (plan, check, supervisor):
        assert f"--save {tmp_path}/run/checkpoints --load {tmp_path}/run/checkpoints" in line and "--lr 1e-4" in line


def test_a_start_on_several_nodes_by_hand(tmp_path: Path) -> None:
    started = start(EXAMPLES / MULTI, tmp_path, SAVES, HEAD="node3", NNODES="4", PORT="1234", SKIP_CHECK="1")
    assert started.ended() == (0, "")
    (supervisor,) = started.noted("resilience.supervisor")
    assert "--nnodes 4:4 --meet node3:1234 --run-id " in supervisor
    assert not started.noted("check_cluster|srun") and started.noted("--world-size 32")


def test_a_start_under_slurm(tmp_path: Path) -> None:
    started = start_in_slurm(tmp_path, SAVES)
    assert started.ended() == (0, "")
    check, train = started.noted("^srun")
    for line in (check, train):
        assert line.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert "--head node0:20085 --expect node0,node1" in check
    assert "--nnodes 2:2 --meet node0:20084 --run-id " in started.noted("resilience.supervisor")[0]
    assert not started.noted("requeue|scancel")


def test_fewer_nodes_are_enough_and_torchrun_is_there(tmp_path: Path) -> None:
    """Slurm then leaves the other nodes alone."""
    started = start_in_slurm(tmp_path / "fewer", SAVES, MIN_NODES="1")
    assert started.ended() == (0, "")
    assert "--nnodes 1:2 --meet node0:20084 " in started.noted("resilience.supervisor")[0]
    assert all("--kill-on-bad-exit=0 --no-kill" in line for line in started.noted("^srun"))
    torchrun = start(EXAMPLES / SINGLE, tmp_path / "torchrun", SAVES, LAUNCHER="torchrun", SKIP_CHECK="1")
    assert torchrun.ended() == (0, "") and not torchrun.noted("resilience.supervisor")
    assert torchrun.noted("torch.distributed.run")[0].startswith("-m torch.distributed.run --standalone --nproc-per-node 8 ")
    wrong = start(EXAMPLES / SINGLE, tmp_path / "wrong", SAVES, LAUNCHER="mpirun", MIN_RANKS="9")
    status, said = wrong.ended()
    assert (
        status == 2 and "LAUNCHER must be supervisor or torchrun" in said and "MIN_RANKS must be a whole number from 1 to 8" in said
    )


def test_a_start_ends_where_the_dry_run_or_the_check_does(tmp_path: Path) -> None:
    wrong = start(EXAMPLES / SINGLE, tmp_path / "wrong", SAVES, DRY_STATUS="2")
    assert wrong.ended() == (2, "") and len(wrong.noted("")) == 1
    ill = start_in_slurm(tmp_path / "ill", SAVES, CHECK_STATUS="1")
    status, said = ill.ended()
    assert status == 1 and "the health check found faults" in said and not ill.noted("resilience.supervisor|requeue")


def test_failures_are_tried_again_while_there_is_progress(tmp_path: Path) -> None:
    """Two that saved, one that did not; each with a check before it."""
    training = f'n=$(grep -c resilience.supervisor "$NOTES")\n((n > 2)) || echo "$n" > "$CHECKPOINTS/{LATEST}"\nexit 7\n'
    started = start(EXAMPLES / SINGLE, tmp_path, training)
    status, said = started.ended()
    assert status == 7 and len(started.noted("resilience.supervisor")) == 3 == len(started.noted("check_cluster"))
    assert "failed (exit status 7) after checkpoint 1 was saved: restarting from that checkpoint" in said
    assert said.splitlines()[-1].endswith("failed (exit status 7) before it saved a checkpoint: not restarted")


@pytest.mark.parametrize("code", [2, 88])
def test_what_would_fail_again_is_not_tried(tmp_path: Path, code: int) -> None:
    """Settings that do not go with the checkpoint, and numbers that are not finite, though a newer checkpoint was saved."""
    started = start(EXAMPLES / SINGLE, tmp_path, f"{SAVES}exit {code}\n")
    status, said = started.ended()
    assert status == code and len(started.noted("resilience.supervisor")) == 1
    assert said.endswith("a restart would fail in the same way: not restarted\n")


def test_torchrun_is_ended_where_another_start_would_fail(tmp_path: Path) -> None:
    """It sees no codes of ranks, which leave theirs in a file."""
    number = "\\130" + "\\0" * 7
    training = f"""trap 'exit 1' ALRM
head -c 16 /dev/zero > "$MEGATRON_LIFE_FILE"
printf '{number}' >> "$MEGATRON_LIFE_FILE"
{SAVES}until wait -n; do sleep 60 & done
"""
    started = start(EXAMPLES / SINGLE, tmp_path, training, LAUNCHER="torchrun", SKIP_CHECK="1", TMPDIR=str(tmp_path))
    status, said = started.ended()
    assert status == 88 and said.endswith("a restart would fail in the same way: not restarted\n")
    assert len(started.noted("torch.distributed.run")) == 1 and not list(tmp_path.glob("tmp.*"))


def test_what_fails_at_once_is_not_tried_for_ever(tmp_path: Path) -> None:
    started = start_in_slurm(tmp_path, "exit 1\n")
    assert started.ended()[0] == 1 and len(started.noted("resilience.supervisor")) == 1 and not started.noted("requeue")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_stop_reaches_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """They save and end, and so does the script; nothing is started again."""
    started = start(EXAMPLES / SINGLE, tmp_path, waiting())
    started.wait_for("rank is up")
    started.process.send_signal(number)
    assert started.ended() == (0, "")
    assert (tmp_path / "run/checkpoints" / LATEST).read_text() == "7" and len(started.noted("resilience.supervisor")) == 1


def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    started = start(EXAMPLES / SINGLE, tmp_path, waiting(hears=False))
    started.wait_for("rank is up")
    started.process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGTERM)
    assert started.ended()[0] == 3


def test_near_the_time_limit_the_job_goes_back_into_the_queue(tmp_path: Path) -> None:
    started = start_in_slurm(tmp_path, waiting())
    started.wait_for("rank is up")
    started.process.send_signal(signal.SIGUSR1)
    status, said = started.ended()
    assert status == 0 and "the job is requeued and will resume from checkpoint 7" in said
    assert started.noted("^sc")[1:] == ["scancel --signal=TERM 42", "scontrol requeue 42"]


def test_a_job_that_gets_nowhere_does_not_go_back(tmp_path: Path) -> None:
    """Its time is too short for one step; the next would be like it."""
    started = start_in_slurm(tmp_path, waiting(saves=False))
    started.wait_for("rank is up")
    started.process.send_signal(signal.SIGUSR1)
    status, said = started.ended()
    assert status == 1 and "the job is not requeued" in said and not started.noted("requeue")


# ---- the real thing


def wait_until(said: Path, pattern: str, process: subprocess.Popen[Any], timeout: float = 120.0) -> None:
    """Until a run has said something."""
    deadline = time.monotonic() + timeout
    while not re.search(pattern, said.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"no {pattern}:\n{said.read_text()[-4000:]}"
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_the_laptop_trains_goes_on_after_a_kill_and_stops_when_asked(tmp_path: Path) -> None:
    """Dry run, health check, two ranks; one is killed, and both start from the last checkpoint; Ctrl-C saves."""
    said, run = tmp_path / "said", tmp_path / "run"
    python = {"PYTHON": warm_python(), "PYTHONPATH": ""}
    small = "--num-layers 1 --hidden-size 32 --seq-length 32 --save-interval 5 --log-interval 1 --train-iters 100000".split()
    small += "--micro-batch-size 1 --global-batch-size 4".split()  # as many microbatches as the script's
    with said.open("w") as file:
        process = subprocess.Popen(
            ["bash", str(EXAMPLES / "train_cpu_laptop.sh"), *small],
            env=environment(**python, RUN=str(run), PORT=str(20000 + os.getpid() % 10000)),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until(said, r"saved \S+/iter_0000005", process)
            words = said.read_text()
            assert (
                words.index("fullest rank") < words.index("check_cluster: no problems found") < words.index("iteration        1/")
            )
            ranks = [pid for pid, name in writers_to(said).items() if name.startswith("rank")]
            assert len(ranks) == 2
            os.kill(ranks[0], signal.SIGKILL)
            wait_until(said, r"resuming from \S+/iter_\d+ at iteration \d+[\s\S]*\n \[.*iteration ", process)
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
            assert process.wait(60) == 85, said.read_text()[-4000:]
        finally:
            for pid in writers_to(said):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
    trained, stop, _ = said.read_text().partition("exiting on SIG")
    assert stop and trained.count("resuming from") == 1, said.read_text()
    last = int((run / "checkpoints" / LATEST).read_text())
    assert last > 5 and (run / f"checkpoints/iter_{last:07d}").is_dir()
