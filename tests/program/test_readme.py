"""The README and the documents tell the truth: commands run (or are accepted, where they need GPUs), names and tables are right."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.make_corpus import write_corpus
from megatron.config.cli import load
from megatron.config.flags import get_flags
from megatron.parallel.topology import Topology
from megatron.spec.schedules import build_1f1b
from megatron_lab.commands import checkpoint, draw_step, evaluate, generate_text, plot_coordinates, plot_memory, verify_layout
from megatron_lab.data_tools import input_flags
from megatron_lab.migration.compat import COMPAT_FLAGS, FLAG_PATTERNS, TRANSLATIONS, RefusedFlag
from megatron_lab.pages.flag_help import PROGRAM_FLAGS
from megatron_lab.resilience.launcher_flags import parse_launcher_flags
from tests.support.cli import ROOT, spawn_cli
from tests.support.launched import SCRIPTS, words_of
from tests.support.runs import arguments, run
from tests.support.vocabularies import sentencepiece
from tests.support.warm_python import warm_python

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT if path.name == "README.md" else ROOT / "docs").as_posix(): path.read_text() for path in DOCUMENTS}


def commands(text: str) -> Iterator[str]:
    """Commands of the shell blocks, each on one line and without its comment."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"\s#.*", "", line).split())
            if command:
                yield command


COMMANDS = [command for page in ("README.md", "launching.md", "speed.md") for command in commands(TEXTS[page])]


def shell(command: str, folder: Path, **variables: str) -> str:
    """Run a command from the repository with a warm Python; returns what it printed."""
    path = os.pathsep.join([str(folder), str(Path(warm_python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    finished = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "NO_SETUP": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout[-4000:]}"
    return finished.stdout


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


SMALLER = """#!/usr/bin/env bash
case "$*" in
    *pretrain_gpt.py*) set -- "${{@/#8/4}}" --num-layers 2 --hidden-size 32 --seq-length 32 --global-batch-size 4 --eval-iters 1 ;;
    *train_tokenizer.py*) set -- "$@" --max-bytes 300000 ;;
esac
exec {python} "$@"
"""
"""A python that makes the quick start's model and vocabulary small, and its processes four. .ci/run runs all in a fresh clone."""


def quick_start(command: str, folder: Path, full: bool) -> None:
    if not full:
        write_program(folder / "python", SMALLER.format(python=warm_python()))
        (folder / "data").mkdir()
        write_corpus(ROOT / "megatron/training", folder / "data/corpus.jsonl")
    said = shell(f"{command} --short --folder {shlex.quote(str(folder / 'data'))}", folder)
    assert "resuming from" in said
    first, last = re.search(r"training loss (8\.\d+) at iteration 1, ([4-8]\.\d+) at iteration 16", said).groups()  # type: ignore[union-attr]
    assert float(last) < float(first)
    assert re.search(r"validation loss \S+ at iteration 12, \S+ at iteration 16", said)
    assert "WARNING" not in said, "nothing is wrong with the data and settings of the quick start"
    num_files = len((folder / "data/corpus.jsonl").read_text().splitlines())
    documents = re.search(r"^([\d,]+) documents, [\d,]+ tokens from", said, re.MULTILINE)
    assert documents is not None and int(documents[1].replace(",", "")) > num_files, "the split takes from parts of files, mixed"
    sample = (folder / "data/run/sample.txt").read_text()
    assert sample.startswith("def read(self,") and len(sample) > 30
    said = re.sub(r"\d+ tokens in .* a second\n", "", said)  # it may stand amid the sample, which comes by way of a pipe
    assert "".join(sample.split()) in "".join(said.split())


def suite(command: str, folder: Path, full: bool) -> None:
    """With a python that notes how it was to run pytest, and does everything else."""
    noted = folder / "noted"
    program = (
        "#!/usr/bin/env bash",
        f'[[ "$1 $2" == "-m pytest" || "$1 $2" == "-m tests.trials.fuzz" ]] || exec {sys.executable} "$@"',
        f'echo "${{@:3}}" > {noted}',
    )
    write_program(folder / "python", "\n".join(program) + "\n")
    shell(command, folder)
    words, given = noted.read_text().split(), command.split()[2:]
    assert words[len(words) - len(given) :] == given
    for word in given:
        assert word in ("--full", "--fuzz") or word.isdigit() or (ROOT / word).exists()


def training_on_one_process(command: str, folder: Path, full: bool) -> None:
    finished = spawn_cli([*shlex.split(command)[1:], "--train-iters", "3", "--eval-iters", "1", "--log-interval", "1"], nproc=None)
    assert finished.returncode == 0, finished.stderr
    losses = [float(found) for found in re.findall(r"lm loss: (\S+)", finished.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "validation loss at iteration 3" in finished.stdout


def help_text(command: str, folder: Path, full: bool) -> None:
    said = spawn_cli(shlex.split(command)[1:], nproc=None).stdout
    assert "--tensor-model-parallel-size" in said


@functools.cache
def corpus_and_tokenizer() -> Path:
    """Return a folder with a corpus and its tokenizer, made once for all commands."""
    folder = Path(tempfile.mkdtemp(prefix="readme-"))
    atexit.register(shutil.rmtree, folder)
    write_corpus(ROOT / "megatron/config", folder / "corpus.jsonl")
    sentencepiece(folder / "corpus.jsonl", folder / "tokenizer.model", 500)
    return folder


@functools.cache
def with_checkpoint() -> Path:
    """Return the same folder with the checkpoint of a tiny model like Llama."""
    folder = corpus_and_tokenizer()
    shape = "--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear"
    tokenizer = {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": folder / "tokenizer.model", "vocab_size": None}
    run([*arguments(**tokenizer, train_iters=1, save=folder / "checkpoints"), *shape.split()])
    return folder


def preprocessing(command: str, folder: Path, full: bool) -> None:
    prefix = folder / "data/corpus"
    prefix.parent.mkdir()
    made = corpus_and_tokenizer()
    places = {**{name: str(made / name) for name in ("corpus.jsonl", "tokenizer.model")}, "data/corpus": str(prefix)}
    words = [places.get(word, word) for word in shlex.split(command)]
    assert set(places.values()) <= set(words)
    finished = spawn_cli(words[1:], nproc=None)
    assert finished.returncode == 0, finished.stderr
    assert Path(f"{prefix}_text_document.bin").stat().st_size > 0


def on_a_checkpoint(command: str, folder: Path, full: bool) -> None:
    """An import takes what an export made."""
    pytest.importorskip("transformers")
    made = with_checkpoint()
    places = {name: str(made / name) for name in ("checkpoints", "corpus.jsonl")}
    places |= {name: str(folder / name) for name in ("exported", "imported")}
    words = [places.get(word, word) for word in shlex.split(command)]
    if "import" in words:
        assert checkpoint.main(["export", places["checkpoints"], places["exported"]]) == 0
    tool = next(tool for tool in (checkpoint, evaluate, generate_text) if tool.__name__.rpartition(".")[2] in words[1])
    assert tool.main(words[2:]) == 0


def bench(command: str, folder: Path, full: bool) -> None:
    told = spawn_cli(["tools/bench.py", "--help"], nproc=None).stdout
    for word in shlex.split(command)[2:]:
        assert word in told


def nodes_and_ranks(words: list[str]) -> int:
    """World size of a torchrun command line."""
    found = {flag: int(value) for flag, value in itertools.pairwise(words) if flag in ("--nnodes", "--nproc-per-node")}
    return found.get("--nnodes", 1) * found["--nproc-per-node"]


def accepted(words: list[str]) -> None:
    """Settings of a command line are valid for the world of its torchrun, or of --nproc."""
    program = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    flags = words[program + 1 :]
    if words[0] == "torchrun":
        load(flags, nodes_and_ranks(words))
    else:
        args = parse_launcher_flags(flags)
        load(args.flags, int(args.nproc))


def launch(command: str, folder: Path, full: bool) -> None:
    accepted(shlex.split(command))


def step_of_slurm(command: str, folder: Path, full: bool) -> None:
    """Settings are valid for two nodes. tests/program/test_run_init_method.py starts ranks so."""
    words = shlex.split(command.replace("$(hostname)", "node-0"))
    load(words[words.index("pretrain_gpt.py") + 1 :], 2 * int(words[words.index("--ntasks-per-node") + 1]))


def launch_script(command: str, folder: Path, full: bool) -> None:
    """Rehearsed, not started (tests/program/test_examples.py starts what can be started here); with the variables that it knows.

    In the normal run only where the command asks for a dry run of the script as it is. Of the others the settings are valid.
    """
    *variables, _, script = shlex.split(command)
    given = dict(word.split("=", 1) for word in variables)
    text = (ROOT / script).read_text() + (ROOT / "examples/launch.sh").read_text()
    assert all(re.search(rf"\b{name}\b", text) for name in given)
    if full or [*given] == ["DRY_RUN"]:
        rehearsal(command.replace("sbatch ", "bash "), folder, full, DRY_RUN="1")
    else:
        _, *words = words_of(
            Path(script).name, folder=folder, **{name: value for name, value in given.items() if name != "DRY_RUN"}
        )
        assert load(words, 1).dry_run is not None


REDUCED = {"3072": "384", "64": "8", "128": "16"}
"""Ranks and batch, stages, and layers of a job of thousands of ranks, and those of a job whose plan takes a second."""


def rehearsal(command: str, folder: Path, full: bool, **variables: str) -> None:
    """Of a large job in the normal run the settings are valid, and a smaller one is rehearsed."""
    if not full and " --global-batch-size 3072 " in command:
        assert load(shlex.split(command)[2:], 1).dry_run is not None
        command = " ".join(REDUCED.get(word, word) for word in command.split())
    said = shell(command, folder, **variables)
    assert re.search(r"needs [\d.]+ GB of device memory", said), said[-2000:]


def page_of_a_flag(command: str, folder: Path, full: bool) -> None:
    assert shell(command, folder).startswith(f"--{command.split()[-1]}\n")


def proof(command: str, folder: Path, full: bool) -> None:
    """Of the page's layout. In the normal run its settings are valid: test_docs_fine_tuning.py runs the tool, and tests/proof/ has
    all layouts."""
    if full:
        assert shell(command, folder).startswith("EQUAL")
        return
    rest, own = verify_layout.split_options(shlex.split(command)[2:])
    assert rest is not None and own.world_size is not None and not load(rest, own.world_size).notes


KINDS: list[tuple[str, Callable[[str, Path, bool], None]]] = [
    (r"bash examples/quickstart\.sh", quick_start),
    (r"bash tests/run\.sh", suite),
    (r"python pretrain_gpt\.py --help$", help_text),
    (r"python pretrain_gpt\.py (--nproc auto )?--mock-data ", training_on_one_process),
    (r"python tools/preprocess_data\.py ", preprocessing),
    (r"python tools/(checkpoint|generate_text|evaluate)\.py ", on_a_checkpoint),
    (r"python tools/bench\.py", bench),
    (r"torchrun |python pretrain_gpt\.py --nproc \d", launch),
    (r"srun .* python pretrain_gpt\.py --init-method ", step_of_slurm),
    (r"(\w+=\S+ )+(bash|sbatch) examples/train_\w+\.sh$", launch_script),
    (r"python pretrain_gpt\.py (--recipe \S+ )?--dry-run ", rehearsal),
    (r"python pretrain_gpt\.py --explain ", page_of_a_flag),
    (r"python tools/verify_layout\.py ", proof),
]


QUICK_START = pytest.mark.full("test_quickstart.py::test_ones_own_text_and_what_comes_next")
"""Of the command that the README opens with: in the normal run the same script trains on a text in one process."""


@pytest.mark.parametrize("command", [pytest.param(one, marks=[QUICK_START] if one == COMMANDS[0] else []) for one in COMMANDS])
def test_a_command_of_the_readme(command: str, tmp_path: Path, full: bool) -> None:
    check = next((check for pattern, check in KINDS if re.match(pattern, command)), None)
    assert check is not None, f"no kind of command that this test can check: {command}"
    check(command, tmp_path, full)


def test_the_readme_opens_with_the_two_commands() -> None:
    assert COMMANDS[:2] == ["bash examples/quickstart.sh", "bash tests/run.sh"]
    assert TEXTS["README.md"].index("![") < TEXTS["README.md"].index("```bash") < 500, "after one picture"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_launch_script_is_in_the_table(script: str) -> None:
    sizes = " x ".join([r"(\d+)"] * 4)
    (row,) = re.findall(rf"^\| `examples/{script}` \| .* \| {sizes} \| (.*) \|$", TEXTS["launching.md"], re.MULTILINE)
    text = (ROOT / "examples" / script).read_text()
    nodes, ranks = map(int, re.search(r"^launch (\d+) (\d+) ", text, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert math.prod(map(int, row[:4])) == nodes * ranks
    for flag, size in zip(("tensor-model", "context", "pipeline-model"), row, strict=False):
        given = re.search(rf"--{flag}-parallel-size (\d+)", text)
        assert size == (given[1] if given else "1")
    assert re.search(rf"memory per \w+ +{re.escape(row[4])}$", text, re.MULTILINE), (
        "as the script says; tests/program/test_examples.py checks that"
    )


@pytest.mark.parametrize("name", TEXTS)
def test_files_exist(name: str) -> None:
    folder = (ROOT if name == "README.md" else (ROOT / "docs" / name).parent).resolve()
    for link in re.findall(r"\]\((?!https:)([^)#]+)\)", TEXTS[name]):
        assert (folder / link).exists(), f"{name} links to {link}"
    for path in re.findall(r"`((?:megatron|megatron_lab|tools|tests|examples|docs|\.ci)/[\w./]+)`", TEXTS[name]):
        assert (ROOT / path).exists(), f"{name} names {path}"


@functools.cache
def flags_of_tools() -> frozenset[str]:
    """Return the names of all flags that a parser of the tools gets."""
    sources = [
        path.read_text()
        for folder in ("megatron_lab", "tests/trials", "tests/mutants", "tests/lines")
        for path in (ROOT / folder).rglob("*.py")
    ]
    added = [names for source in sources for names in re.findall(r'\badd(?:_argument)?\(((?:\s*"-[\w-]+",?)+)', source)]
    return frozenset(flag for names in added for flag in re.findall(r'"--([\w-]+)"', names))


@pytest.mark.parametrize("name", TEXTS)
def test_flags_exist(name: str) -> None:
    others = {*PROGRAM_FLAGS, *input_flags.IGNORED_FLAGS, *input_flags.REFUSED_FLAGS, "help", "no-", "flag"}
    launcher = {"standalone", "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "max-restarts"}
    docker, pip = {"build-arg", "rm", "gpus", "ipc"}, {"no-deps"}
    kubectl, hub, slurm, llama_cpp = (
        {"max-log-requests"},
        {"local-dir"},
        {"signal", "batch", "partition", "account", "exclude", "nodes"},
        {"outfile"},
    )
    launcher |= {"ntasks-per-node"}
    scripts = {"short", "folder", "text", "full", "fuzz"}
    told = re.findall(r"^  --([\w-]+) ", verify_layout.HELP + plot_memory.HELP + plot_coordinates.HELP, re.MULTILINE)
    supervisor = re.findall(r'"--([\w-]+)"', (ROOT / "megatron_lab/resilience/command.py").read_text())
    foreign = (
        {*COMPAT_FLAGS, *TRANSLATIONS, "our-own-flag", "use-rotary-position-embeddings", "no-position-embedding"}
        if name in ("from_megatron.md", "checkpoints.md", "recipes/move_from_megatron.md")
        else set()
    )
    known = {
        *get_flags(),
        *foreign,
        *docker,
        *pip,
        *kubectl,
        *hub,
        *slurm,
        *llama_cpp,
        *others,
        *launcher,
        *supervisor,
        *scripts,
        *flags_of_tools(),
        *told,
    }
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", TEXTS[name]):
        assert flag in known or flag.removeprefix("no-") in get_flags(), f"{name} names --{flag}"


def test_names_of_the_tour_are_in_their_files() -> None:
    """`file.py`, `name`: the text says where a name is."""
    found = re.findall(r"`(megatron(?:_lab)?/[\w/]+\.py)`,\s+`([\w.]+)(?:\(\w*\))?`", TEXTS["tour.md"])
    assert len(found) > 15
    for path, name in found:
        for part in name.split("."):
            assert re.search(rf"\b(def|class) {part}\b", (ROOT / path).read_text()), f"{path} has no {part}"


def test_what_is_not_built_is_refused() -> None:
    assert all(isinstance(COMPAT_FLAGS[name], RefusedFlag) for name in ("moe-layer-recompute", "fp4-format"))
    assert "moe-deepep-*" in FLAG_PATTERNS
    assert not set(get_flags()) & set(COMPAT_FLAGS)


def test_the_picture_is_what_the_tool_draws() -> None:
    assert (ROOT / "docs/images/step.svg").read_text() == draw_step.build_svg(), "python tools/draw_step.py docs/images/step.svg"


def test_the_rooms_of_the_picture_exist() -> None:
    picture = TEXTS["tour.md"].split("## The packages")[1].split("```")[1]
    drawn = set(re.findall(r"^  (\w+)/", picture, re.MULTILINE))
    folders = [path for package in ("megatron", "megatron_lab") for path in (ROOT / package).iterdir() if path.is_dir()]
    assert drawn == {path.name for path in folders if path.name != "__pycache__"}


@pytest.mark.parametrize("pp_before_dp", [False, True])
def test_the_worked_example_of_the_groups(pp_before_dp: bool) -> None:
    text = TEXTS["parallelism.md"].split("With `--use-tp-pp-dp-mapping`")[int(pp_before_dp)]
    topology = Topology(tp=2, dp=2, pp=2, pp_before_dp=pp_before_dp)
    for axis, name in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline")):
        row = re.search(rf"^\| {axis} \|(.*)\|$", text, re.MULTILINE)
        assert row is not None
        assert [int(place) for place in row[1].split("|")] == [topology.get_coordinates(rank)[axis] for rank in range(8)]
        members = re.search(rf"^\| {name} \| (.*) \|$", text, re.MULTILINE)
        assert members is not None
        assert [tuple(map(int, group.split(","))) for group in re.findall(r"\[([^]]*)\]", members[1])] == topology.get_groups(axis)


def test_the_example_of_a_schedule() -> None:
    for stage, ops in enumerate(build_1f1b(3, 4).ops):
        line = f"stage {stage}   " + " ".join(f"{op.type.value}{op.microbatch}" for op in ops)
        assert line in TEXTS["parallelism.md"]
