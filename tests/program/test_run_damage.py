"""Damaged checkpoints and full disks: always found out and said, and the last good checkpoint is gone on from.

Every damage is looked for in this process, and a few in whole runs; `--full` takes whole runs of all.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.manifest import Checksum, Manifest, StoredFile
from megatron.checkpoint.save_folder import LATEST, load_manifest, record_damage
from megatron.checkpoint.storage import MANIFEST
from megatron.checkpoint.storage_url import open_storage
from megatron.config.cli import load
from megatron.training.resume import select_checkpoint
from megatron_lab.verification.local_ranks import run_ranks
from tests.support.forked_modules import fork_modules
from tests.support.runs import Ended, arguments, checkpoint, complete_checkpoints, digest, launch, report, run, saved_tensors

STEPS, INTERVAL, STOP = 3, 1, 2
SETTINGS: dict[str, Any] = {
    "train_iters": STEPS,
    "save_interval": INTERVAL,
    "global_batch_size": 4,
    "use_distributed_optimizer": True,
    "lr_decay_style": "cosine",
}
DATA = "rank_00001.safetensors"


@pytest.fixture(scope="module")
def run_to_the_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that goes through, on two data ranks. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    run(arguments(**SETTINGS, save=folder), 2)
    return folder


@pytest.fixture(scope="module")
def whole(run_to_the_end: Path) -> str:
    """Digest of its last checkpoint."""
    return digest(run_to_the_end, STEPS)


@pytest.fixture(scope="module")
def stopped(run_to_the_end: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as it was before the last checkpoint: with those of iterations 1 and 2."""
    folder = Path(shutil.copytree(run_to_the_end, tmp_path_factory.mktemp("stopped") / "run"))
    shutil.rmtree(checkpoint(folder, STEPS))
    (folder / LATEST).write_text(f"{STOP}\n")
    return folder


def flip(path: Path, at: float) -> None:
    """Change one bit, at a fraction of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the weights": (lambda path: flip(path / DATA, 0.7), DATA),
    "the last bit of the weights": (lambda path: flip(path / "rank_00000.safetensors", 1.0), "rank_00000.safetensors"),
    "a bit of the header": (lambda path: flip(path / DATA, 0.0), DATA),
    "weights truncated": (lambda path: truncate(path / DATA), DATA),
    "weights deleted": (lambda path: (path / DATA).unlink(), f"{DATA} is missing"),
    "a bit of the state": (lambda path: flip(path / "state.json", 0.5), "state.json"),
    "settings deleted": (lambda path: (path / "config.json").unlink(), "config.json"),
    "a bit of the manifest": (lambda path: flip(path / MANIFEST, 0.5), MANIFEST),
    "manifest truncated": (lambda path: truncate(path / MANIFEST), MANIFEST),
    "manifest deleted": (lambda path: (path / MANIFEST).unlink(), MANIFEST),
    "all deleted": (lambda path: shutil.rmtree(path), MANIFEST),
}


def forge(path: Path, **counts: object) -> None:
    """Write counts into the state, and make its checksum, and the digests that follow from it, right."""
    state = json.loads((path / "state.json").read_text())
    state["progress"] |= counts
    data = json.dumps(state).encode()
    (path / "state.json").write_bytes(data)
    manifest = load_manifest(open_storage(path))
    files = {**manifest.files, "state.json": StoredFile(len(data), Checksum(data).text)}
    (path / MANIFEST).write_bytes(Manifest(manifest.tensors, files).to_json())


def forge_shape(path: Path) -> None:
    """A tensor of 10^30 rows."""
    manifest = load_manifest(open_storage(path))
    name, tensor = next(iter(manifest.tensors.items()))
    tensors = {**manifest.tensors, name: dataclasses.replace(tensor, shape=(10**30, *tensor.shape[1:]))}
    (path / MANIFEST).write_bytes(Manifest(tensors, manifest.files).to_json())


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES |= {
    "a run that is done at iteration 10^30": (lambda path: forge(path, iteration=10**30), "state.json"),
    "an iteration that is another": (lambda path: forge(path, iteration=STOP + 1), "state.json"),
    "samples that are no number": (lambda path: forge(path, consumed_samples="many"), "state.json"),
    "samples below zero": (lambda path: forge(path, consumed_samples=-8, updated_samples=-8), "state.json"),
    "more updated than consumed": (lambda path: forge(path, updated_samples=10**6), "state.json"),
    "counts that are none": (lambda path: forge(path, iteration=True), "state.json"),
    "a shape of 10^30": (forge_shape, MANIFEST),
    "JSON of too many levels": (lambda path: write_text(path / MANIFEST, "[" * 10**6), MANIFEST),
    "a pipe for settings": (lambda path: put_a_pipe(path / "config.json"), "config.json"),
}


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the checkpoints in a folder, and the latest file."""
    paths = [*folder.glob("iter_*/*"), *folder.glob("latest*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


IN_RUNS = ("a bit of the weights",)
"""Found by reading the weights, which is when all ranks must go back together. (test_run_begins.py has one of the state.)"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_damaged_checkpoint_is_passed_over:
        metafunc.parametrize("what", DAMAGES if metafunc.config.getoption("--full") else IN_RUNS)
    if "failing" in metafunc.fixturenames:
        metafunc.parametrize("failing", [0, 1] if metafunc.config.getoption("--full") else [1])


@pytest.mark.parametrize("what", DAMAGES)
def test_every_damage_is_found(tmp_path: Path, stopped: Path, what: str) -> None:
    """By who looks for a checkpoint to resume from, or else by who reads its tensors; the one before is taken then."""
    folder = copied(stopped, tmp_path)
    damage, named = DAMAGES[what]
    damage(checkpoint(folder, STOP))
    config = load(arguments(**SETTINGS, load=folder), 1).config
    damaged: dict[int, str] = {}
    chosen = select_checkpoint(config, str(folder), None, 61, damaged, continues_run=True)
    assert chosen is not None
    if Path(chosen.path) == checkpoint(folder, STOP):
        with pytest.raises(DamagedCheckpointError) as found:
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                saved_tensors(folder, STOP, kind)
        record_damage(chosen.path, found.value, damaged, may_fall_back=True)
        chosen = select_checkpoint(config, str(folder), None, 61, damaged, continues_run=True)
        assert chosen is not None
    assert Path(chosen.path) == checkpoint(folder, INTERVAL)
    (warning,) = (note for note in chosen.notes if "WARNING" in note)
    assert f"taking {checkpoint(folder, INTERVAL)}" in warning
    assert str(checkpoint(folder, STOP)) in warning and named in warning


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, stopped: Path, whole: str, what: str) -> None:
    """All ranks go back together to the one before, say why, and end where they would have ended."""
    folder = copied(stopped, tmp_path)
    damage, named = DAMAGES[what]
    damage(checkpoint(folder, STOP))
    said = run(arguments(**SETTINGS, save=folder, load=folder), 2)
    warning = next(line for line in said.splitlines() if "WARNING" in line)
    assert f"taking {checkpoint(folder, INTERVAL)}" in warning
    assert str(checkpoint(folder, STOP)) in warning and named in said
    assert f"resuming from {checkpoint(folder, INTERVAL)} at iteration {INTERVAL}" in said
    assert digest(folder, STEPS) == whole
    assert saved_tensors(folder, STOP), "it has been replaced by a sound one"


def refused(folder: Path, **settings: Any) -> str:
    """What a run says that cannot begin; it changes nothing."""
    before = contents(folder)
    ended = launch(arguments(**SETTINGS, save=folder, load=folder, **settings), 2)
    assert all(end.code == 1 for end in ended), report(ended)
    assert contents(folder) == before
    return ended[0].stderr + ended[0].stdout


def test_all_are_damaged(tmp_path: Path, stopped: Path) -> None:
    """No run begins afresh where there were checkpoints."""
    folder = copied(stopped, tmp_path)
    flip(checkpoint(folder, STOP) / DATA, 0.6)
    truncate(checkpoint(folder, INTERVAL) / DATA)
    said = refused(folder)
    assert all(str(checkpoint(folder, iteration) / DATA) in said for iteration in (INTERVAL, STOP))
    assert "holds no complete checkpoint" in said


def test_the_step_asked_for_is_damaged(tmp_path: Path, stopped: Path) -> None:
    """Nothing else is taken in its place."""
    folder = copied(stopped, tmp_path)
    flip(checkpoint(folder, STOP) / DATA, 0.6)
    said = refused(folder, ckpt_step=STOP)
    assert (
        str(checkpoint(folder, STOP) / DATA) in said
        and "the data of" in said
        and "was altered: its checksum does not match" in said
    )


# ---- full disks


def small_files(*ranks: int) -> Callable[[int], None]:
    """Return a `before` after which these ranks, and processes that they start, can write no file larger than 20 kB."""

    def before(rank: int) -> None:
        fork_modules()
        if rank in ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    return before


def test_a_rank_that_cannot_write_in_the_background(tmp_path: Path, whole: str, failing: int) -> None:
    """Training goes on, and each failure is told; at the end it is an error, for the last weights are on no disk."""
    ended = launch(arguments(**SETTINGS, save=tmp_path, async_save=True), 2, before=small_files(failing), gloo=True)
    assert all(end.code == 1 for end in ended), report(ended)
    said = ended[0].stdout
    assert said.count("File too large") >= 2, report(ended)
    assert f"iteration {STEPS}" in said or f"{STEPS}/" in said, "training went on"
    assert "File too large" in ended[0].stderr and f"iter_{STEPS:07d}" in ended[0].stderr
    assert complete_checkpoints(tmp_path) == []
    run(arguments(**SETTINGS, save=tmp_path, load=tmp_path), 2)
    assert digest(tmp_path, STEPS) == whole


def test_a_rank_that_cannot_write(tmp_path: Path, stopped: Path, whole: str) -> None:
    """Without the background, the run ends there; the checkpoints before stay."""
    folder = copied(stopped, tmp_path)
    ended = launch(arguments(**SETTINGS, save=folder, load=folder), 2, before=small_files(1))
    assert all(end.code == 1 for end in ended), report(ended)
    said = ended[0].stderr
    assert "cannot save" in said and "rank 1: " in said and "File too large" in said and "Traceback" not in said, report(ended)
    assert ended[1].stderr == "" and not list(folder.glob(".iter*"))
    assert complete_checkpoints(folder) == [checkpoint(folder, iteration).name for iteration in (INTERVAL, STOP)]
    run(arguments(**SETTINGS, save=folder, load=folder), 2)
    assert digest(folder, STEPS) == whole


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MS_REMOUNT = 0x20000, 0x4000, 1 << 18, 0x20


def mount(folder: Path, kilobytes: int, flags: int = 0) -> None:
    """A disk of this size in memory, which only this process and those that it starts see."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = f"size={kilobytes}k".encode()
    if not flags and (libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)):
        raise PermissionError(ctypes.get_errno(), "cannot make a name space")
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, size):
        raise PermissionError(ctypes.get_errno(), "cannot mount")


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.full("test_a_rank_that_cannot_write")), True])
def test_a_full_disk(tmp_path: Path, stopped: Path, whole: str, in_background: bool) -> None:
    """Where there is room for two checkpoints and a half. With more room the run goes on as if nothing had been."""
    settings = {**SETTINGS, "async_save": in_background, "save": tmp_path, "load": tmp_path}
    size = sum(path.stat().st_size for path in checkpoint(stopped, STOP).iterdir()) // 1024

    def body(_: int) -> tuple[list[Ended], list[str], str] | None:
        try:
            mount(tmp_path, size * 5 // 2)
        except PermissionError:
            return None
        ended = launch(arguments(**settings), 2, before=lambda _: fork_modules())
        there = sorted(path.name for path in tmp_path.iterdir())
        mount(tmp_path, size * 10, _MS_REMOUNT)
        run(arguments(**settings | {"async_save": False}), 2)
        return ended, there, digest(tmp_path, STEPS)

    (outcome,) = run_ranks(1, body, init=False)
    if outcome is None:
        pytest.skip("mounting a disk needs rights")
    ended, there, last = outcome
    assert all(end.code == 1 for end in ended), report(ended)
    assert "No space left on device" in ended[0].stderr
    assert there == ["history.jsonl", "iter_0000001", "iter_0000002", LATEST, "run.json"]
    assert last == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize("closed", [False, True])
def test_outputs_that_fail_do_not_end_a_run(tmp_path: Path, closed: bool) -> None:
    """A full disk under all of them, or a pipe that nobody reads: each is told once, and the run and its checkpoints go on."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def before(_: int) -> None:
        if closed:
            read_end, write_end = os.pipe()
            os.close(read_end)
            os.dup2(write_end, 1)
        else:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

        written = []

        def full(*_: Any) -> None:
            written.append(1)
            if len(written) > 1:  # the first begins the file
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        RecordWriter.write = full

    folder = tmp_path / "run"
    outputs = {"metrics_file": "/dev/full", "save_trace": "/dev/full", "tensorboard_dir": tmp_path / "board"}
    (ended,) = launch(arguments(train_iters=3, save=folder, **outputs), before=before)
    assert ended.code == 0, report([ended])
    assert complete_checkpoints(folder) == ["iter_0000003"]
    said = ended.stderr.splitlines()
    for name in ("stdout", "--metrics-file /dev/full", "--save-trace /dev/full", "--tensorboard-dir"):
        assert sum(line.startswith(name) and "training continues" in line for line in said) == 1, ended.stderr
    assert len(said) == 4, ended.stderr
