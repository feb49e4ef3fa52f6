"""tools/verify_layout.py: its flags, what it refuses, and how a proof is told."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.flags import get_flags
from megatron_lab.commands.verify_layout import HELP, main, split_options
from megatron_lab.proofs.isolation import build_single_process_variant, isolate, iter_reduced_variants, iter_single_axis_variants
from megatron_lab.proofs.report import Proof, build_report_json, format_report
from megatron_lab.proofs.verify import build_trace, get_vocab_size, write_trace
from megatron_lab.verification.diagnosis import diagnose
from megatron_lab.verification.difference_text import build_factors, explain_factor
from megatron_lab.verification.local_ranks import RanksError
from megatron_lab.verification.observation import Observation
from tests.support.cli import ROOT
from tests.support.runs import launch
from tests.support.verify_observations import FLAGS, TENSOR, observed, scale_gradients

LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --num-layers 4 --global-batch-size 8"
)


def run_main(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(argv)
    out = capsys.readouterr()
    return status, out.out, out.err


# ---- the command line


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from megatron_lab.commands.verify_layout import main; assert main(['--help']) == 0; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    help_text, _, imported = done.stdout.rstrip().rpartition("\n")
    assert imported == "[]" and help_text.replace("\\\n", "").split() == HELP.split()


def test_own_flags_are_none_of_the_run() -> None:
    own = {line.split()[0].lstrip("-") for line in HELP.splitlines() if line.startswith("  --")} - {"help"}
    assert own == {"world-size", "steps", "max-ranks", "quick", "json", "trace", "reference"} and not own & set(get_flags())


def test_own_flags_are_parted_from_those_of_the_run() -> None:
    rest, own = split_options(
        ["--lr=0.1", "--max_ranks", "4", "--swiglu", "--steps=2", "--quick", "--split", "1,1,1", "--adam-eps", "-1"]
    )
    assert rest == ["--lr", "0.1", "--swiglu", "--split", "1,1,1", "--adam-eps", "-1"]
    assert (own.max_ranks, own.steps, own.quick, own.traces) == (4, 2, True, [])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--steps", "0"], "--steps 0: --steps takes one whole number from 1 to 1,000."),
        (["--world-size", "10000000"], "--world-size takes one whole number from 1 to 1,048,576."),
        (["--quick", "yes"], "--quick takes no value."),
        (["--json"], "--json takes one file."),
        (["--trace", "a", "--trace", "b", "--lr", "1"], "Two --trace files can only be used with --json"),
        (["--trace", "a", "--trace", "b", "--steps", "2"], "nothing is run: leave out --steps."),
        (
            ["--quick", "--trace", "a", "--trace", "b", "--max_ranks", "2"],
            "nothing is run: leave out --quick and --max-ranks.",
        ),
        (["--trace", "a", "--trace", "b", "--world-size", "2"], "leave out --world-size."),
        (["--trace", "a", "--trace", "b", "--json", "./a"], "--json ./a would be written over the --trace. Give another file."),
    ],
)
def test_own_flags_that_are_wrong(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_options(argv)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("more", "world_size"),
    [("--lr -1 --tensor-model-parallel-size 3", 3), ("--hidden-sise 4", 1), ("--pipeline-model-parallel-size 0", 1)],
)
def test_bad_settings_are_worded_as_the_run_words_them(more: str, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*FLAGS.split(), *more.split()]
    with pytest.raises(ConfigError) as expected:
        load(argv, world_size)
    status, out, err = run_main(argv, capsys)
    assert status == 2 and not out and err == f"verify_layout.py: {expected.value}\n"


def test_a_dry_run_is_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run_main([*FLAGS.split(), "--dry-run"], capsys)
    assert status == 2 and "--dry-run works only with pretrain_gpt.py" in err


def test_the_vocabulary_needs_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = FLAGS.split()
    at = words.index("--tokenizer-type")
    words[at : at + 4] = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        "/no/vocab.json",
        "--merge-file",
        "/no/merges.txt",
    ]
    assert get_vocab_size(load([*words, "--vocab-size", "50257"], 1).config.data) == 50257
    assert get_vocab_size(load(FLAGS.split(), 1).config.data) == 16  # NullTokenizer's end of document comes on top
    status, out, _ = run_main([*words, "--steps", "1"], capsys)
    assert status == 0 and "--vocab-file /no/vocab.json and --merge-file /no/merges.txt are missing: a vocabulary of 50,257" in out
    with pytest.raises(ValueError, match="a file is missing: --vocab-file /no/vocab.json, --merge-file /no/merges.txt"):
        get_vocab_size(load(words, 1).config.data)


def test_traces_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("no trace\n")
    status, _, err = run_main(["--trace", str(tmp_path / "a"), "--trace", str(tmp_path / "b")], capsys)
    assert status == 2 and str(tmp_path / "a") in err


def test_a_file_that_cannot_be_written_is_known_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_main([*FLAGS.split(), "--json", "/nowhere/found.json"], capsys)
    assert status == 2 and not out and "--json /nowhere/found.json cannot be written" in err


def stands_for_proofs(monkeypatch: pytest.MonkeyPatch, *, equal: bool = True) -> list[int]:
    """Have the tool prove nothing and take a proof that is made; returns a list that gets the world sizes it would have run."""
    asked: list[int] = []
    observation = observed()
    if not equal:
        scale_gradients(observation, 2.0)
    proof = Proof("tensor 2 x pipeline 1 x data 1", diagnose(observation))

    def verify_layout(config: Config, world_size: int, *_: object, **__: object) -> list[Proof]:
        asked.append(world_size)
        return [proof]

    monkeypatch.setattr("megatron_lab.proofs.verify.verify_layout", verify_layout)
    return asked


def test_a_folder_is_no_file_and_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = stands_for_proofs(monkeypatch)
    status, out, err = run_main([*FLAGS.split(), "--json", str(tmp_path)], capsys)
    assert status == 2 and not out and not asked
    assert err.startswith(f"verify_layout.py: --json {tmp_path} cannot be written (Is a directory). Give a path of a file")
    status, out, err = run_main([*FLAGS.split(), "--save-trace", str(tmp_path)], capsys)
    assert status == 2 and not out and not asked
    assert err == f"verify_layout.py: --save-trace {tmp_path} is a folder. Give the path of a file.\n"


def test_the_json_comes_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that does not come to its end leaves no empty file, and keeps the one of before."""
    path, asked = tmp_path / "found.json", stands_for_proofs(monkeypatch)
    argv = [*FLAGS.split(), "--json", str(path)]
    status, out, _ = run_main(argv, capsys)
    assert status == 0 and out.startswith("EQUAL") and json.loads(path.read_text())["equal"] is True and asked == [1]
    told = path.read_text()
    monkeypatch.setattr("megatron_lab.proofs.verify.verify_layout", lambda *_, **__: 1 / 0)
    for name in (path, tmp_path / "other.json"):
        with pytest.raises(ZeroDivisionError):
            main([*FLAGS.split(), "--json", str(name)])
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"] and path.read_text() == told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize(("equal", "code"), [(True, 2), (False, 1)])
def test_a_disk_that_is_full_takes_no_verdict_away(
    equal: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stands_for_proofs(monkeypatch, equal=equal)
    status, out, err = run_main([*FLAGS.split(), "--json", "/dev/full"], capsys)
    assert status == code and out.startswith("EQUAL" if equal else "DIFFERENT")
    assert err.startswith("verify_layout.py: --json /dev/full could not be written whole (No space left on device).")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_report_that_cannot_be_printed_is_told_by_its_verdict(tmp_path: Path) -> None:
    a, found = str(tmp_path / "a"), tmp_path / "found.json"
    write_trace(build_trace(observed()), a)
    argv = [sys.executable, "tools/verify_layout.py", "--trace", a, "--trace", a, "--json", str(found)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and json.loads(found.read_text())["equal"] is True
    assert done.stderr.startswith("verify_layout.py: the report could not be printed (No space left on device): EQUAL to rounding")


def test_two_traces_are_compared_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, found = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / "found.json"
    trace = build_trace(observed())
    write_trace(trace, a)
    trace.steps[1] = dataclasses.replace(trace.steps[1], loss=7.0)
    write_trace(trace, b)
    for other, code in ((a, 0), (b, 1)):
        status, out, err = run_main(["--trace", other, "--trace", a, "--json", str(found)], capsys)
        read = json.loads(found.read_text())
        assert (status, err, read["equal"], read["traces"]) == (code, "", not code, [other, a])
        assert out.startswith("DIVERGE" if code else "EQUAL") and read["steps"] == [1, 2]
    status, out, err = run_main(["--trace", a, "--trace", a, "--json", str(tmp_path)], capsys)
    assert status == 2 and not out and "(Is a directory)" in err


INTERRUPTS = {
    "while ranks run": """
import megatron_lab.verification.prove as module
def observe(rank, *args):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
module.observe_rank = observe
""",
    "while a rank is started": """
import megatron_lab.verification.local_ranks as module
fork = module.fork_rank
def interrupted(*args):
    fork(*args)
    raise KeyboardInterrupt
module.fork_rank = interrupted
""",
    "where Python drops what is raised": """
told = []
def once():
    if not told:
        told.append(True)
        os.kill(os.getpid(), signal.SIGINT)
os.register_at_fork(after_in_parent=once)
""",
}


@pytest.mark.parametrize("when", INTERRUPTS)
def test_an_interrupt_ends_it_in_one_line_with_all_its_ranks(when: str) -> None:

    def before(_: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts in the background
        exec(INTERRUPTS[when], {"os": os, "signal": signal})
        sys.exit(main([*FLAGS.split(), *TENSOR.split()]))

    held, holds = os.pipe()
    (ended,) = launch([], before=before)
    assert (ended.code, ended.stdout, ended.stderr) == (130, "", "verify_layout.py: interrupted before it was done\n")
    os.close(holds)
    assert multiprocessing.connection.wait([held], 10.0) and not os.read(held, 1), "a process that it has forked is left behind"
    os.close(held)


# ---- what is told


def test_an_equal_proof_is_told_in_one_line() -> None:
    proof = Proof(
        "tensor 2 x pipeline 1 x data 1", diagnose(observed()), preserved=["heads"], reduced=["layers 8 -> 2"], seconds=1.5
    )
    lines = format_report([proof])
    assert lines[0].startswith("EQUAL to one process: tensor 2 x pipeline 1 x data 1: loss, 28 gradients and weights of 2 steps; ")
    assert lines[1] == "" and lines.index("kept") < lines.index("  heads") < lines.index("  layers 8 -> 2")
    assert build_report_json([proof])["equal"] is True
    assert build_report_json([dataclasses.replace(proof, differs_from_trace=True)])["equal"] is False


def test_a_different_proof_tells_the_place_before_the_figures() -> None:
    observation = observed()
    scale_gradients(observation, 2.0)
    proof = Proof(
        "tensor 2 x pipeline 1 x data 1", diagnose(observation), isolation=["comes with --tensor-model-parallel-size 2 alone"]
    )
    lines = format_report([proof])
    assert lines[0].startswith(
        "DIFFERENT from one process: tensor 2 x pipeline 1 x data 1: gradient of final_norm.bias, step 1: 2.0x"
    )
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(start)) for start in ("where", "when", "kind", "group", "what")
    ]
    assert order == sorted(order) and lines[2:7] == [lines[i] for i in order]
    assert "  comes with --tensor-model-parallel-size 2 alone" in lines
    table = [line for line in lines if line.endswith(" 2.0x")]
    assert len(table) == 8 and all(line.split()[0] == "1" for line in table)  # of the first step that differs
    found = build_report_json([proof])
    assert found["equal"] is False and found["runs"][0]["findings"][0]["group"] == "tensor"
    json.dumps(found, allow_nan=False)


def test_a_run_that_fails_is_told_with_its_error() -> None:
    proof = Proof(
        "tensor 1 x pipeline 2 x data 1",
        None,
        "rank 0 failed:\nTraceback\nRuntimeError: no gradient reached layers.1.x\n\nnot done when the others failed: rank 1",
    )
    lines = format_report([Proof("tensor 2", diagnose(observed())), proof])
    assert lines[0] == "FAILS: tensor 1 x pipeline 2 x data 1 does not run to its end: RuntimeError: no gradient reached layers.1.x"
    assert "tensor 2: equal" in lines and "rank 0 failed:" in lines
    assert build_report_json([proof])["runs"][0]["failure"].startswith("rank 0 failed")


def test_factors_that_are_facts_of_the_layout() -> None:
    factors = build_factors(
        {"tensor": 2, "data": 3, "pipeline": 2}, num_microbatches=5, num_counted=40, num_tokens=100, loss_scale=1.0
    )
    assert explain_factor(3.0, factors) == ("3.0x, the data size: a sum over the data group is counted 3 times", "data")
    text, group = explain_factor(2.0, factors)
    assert "the tensor size or the pipeline size" in text and group == ""
    assert explain_factor(1 / 3, factors)[1] == "data" and explain_factor(7.0, factors)[1] == ""
    assert "the count of tokens ignores the loss mask" in explain_factor(0.4, factors)[0]
    assert [explain_factor(ratio, factors)[0] for ratio in (7.3, math.pi)] == [
        f"{x}x what it should be" for x in ("7.3", "3.14159")
    ]


# ---- with what it comes and goes


def test_less_of_the_layout_is_valid_and_different() -> None:
    config = load([*FLAGS.split(), *LAYOUT.split()], 8).config
    one = build_single_process_variant(config, 8)
    assert one is not None and one.world_size == 1 and one.config.training.global_batch_size == 8
    alone = list(iter_single_axis_variants(config, 8))
    assert [(v.world_size, v.config.parallel.pipeline_model_parallel_size) for v in alone] == [(2, 1), (2, 2), (2, 1)]
    assert alone[0].description == "--tensor-model-parallel-size 2 alone (pipeline and data size 1)"
    assert alone[0].config.parallel.sequence_parallel and alone[2].config.parallel.sharding == "optim"
    without = {variant.description for variant in iter_reduced_variants(config, 8)}
    assert {"--sequence-parallel", "--overlap-grad-reduce", "--overlap-param-gather", "--clip-grad"} <= without
    assert not any("rampup" in words or "offload" in words for words in without)  # they are not there to be left out
    assert build_single_process_variant(one.config, 1) is None


def test_what_a_difference_comes_with() -> None:
    """Made-up runs: what is divided wrongly is divided so wherever there are tensor ranks."""
    config = load([*FLAGS.split(), *LAYOUT.split()], 8).config
    looked, equal, scaled = [], observed(TENSOR), observed(TENSOR)
    scale_gradients(scaled, 2.0)

    def prove(config: Config, world_size: int, *, dropout: bool = True) -> Observation:
        looked.append(world_size)
        parallel = config.parallel
        if parallel.pipeline_model_parallel_size == 2 and parallel.tensor_model_parallel_size == 1:
            raise RanksError("no")
        return scaled if parallel.tensor_model_parallel_size == 2 and parallel.sequence_parallel else equal

    lines = isolate(config, 8, prove, max_seconds=60)
    assert lines[0] == "comes with --tensor-model-parallel-size 2 alone (pipeline and data size 1) (gradient of final_norm.bias)"
    assert lines[1] == "comes with --pipeline-model-parallel-size 2 alone (tensor and data size 1) (the run fails)"
    assert (
        "goes away without --sequence-parallel" in lines
        and "does not come with data size 2 alone (tensor and pipeline size 1)" in lines
    )
    assert any(line.startswith("stays without --overlap-grad-reduce") for line in lines)
    assert looked[0] == 1
    assert isolate(config, 8, prove, max_seconds=-1)[-1].startswith("no time was left")


def test_what_is_there_in_one_process_is_not_the_layout() -> None:
    config = load([*FLAGS.split(), *LAYOUT.split()], 8).config
    equal, scaled = observed(TENSOR), observed(TENSOR)
    scale_gradients(scaled, 3.0)

    def prove(config: Config, world_size: int, *, dropout: bool = True) -> Observation:
        assert world_size == 1
        return scaled if dropout else equal

    lines = isolate(config, 8, prove, max_seconds=60)
    assert lines[0].startswith("it occurs in one process too (gradient of final_norm.bias)") and "not the layout" in lines[0]
    assert lines[1] == "goes away there without dropout" and all(line.startswith("stays there without") for line in lines[2:])
