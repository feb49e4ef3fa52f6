"""tools/checkpoint.py: what it says of checkpoints, what it finds wrong with them, and checkpoints cut anew."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.data_files import DataFileReader
from megatron.checkpoint.local_storage import LocalStorage
from megatron.checkpoint.manifest import digest_entries
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.checkpoints import compare
from megatron_lab.checkpoints.compare import compare_tensors
from megatron_lab.checkpoints.stream import write_checkpoint
from megatron_lab.commands.checkpoint import main
from megatron_lab.foreign.source import StoredCheckpoint
from tests.support.checkpoint_worlds import read_manifest
from tests.support.runs import arguments, checkpoint, run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks at iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("original") / "run"
    layout = {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim", "num_layers": 4}
    run(arguments(train_iters=2, save=folder, save_interval=1, bf16=True, **layout), 4)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def said(capsys: pytest.CaptureFixture[str], status: int, *words: Any) -> str:
    """What the tool prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    return capsys.readouterr().out


def failed(capsys: pytest.CaptureFixture[str], status: int, *words: Any) -> str:
    """What it prints where it cannot do its work."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == status
    return capsys.readouterr().err


def changed(path: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy of a checkpoint with one tensor changed by a function."""
    source = StoredCheckpoint(path)

    def read(wanted: str, box: TensorSlice) -> torch.Tensor:
        tensor = source.read_stored(wanted, box)
        return change(tensor) if wanted == name else tensor

    return Path(write_checkpoint(folder, 2, source.tensors, read, source.config, source.state))


def test_inspect(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, "inspect", original)
    found = json.loads(said(capsys, 0, "inspect", original / "iter_0000002", "--json"))
    manifest = read_manifest(checkpoint(original, 2))
    assert found["content_digest"] == manifest.content_digest and found["digest"] == manifest.digest
    assert found["layout"] == {"TP": 2, "PP": 1, "schedule": "1f1b", "sharding": "optim"}
    assert found["progress"]["iteration"] == 2 and found["progress"]["consumed samples"] == 16
    assert found["vocab_size"] == 61 and found["has_optimizer"]
    assert found["bytes"] == sum(file.num_bytes for file in manifest.files.values())
    weights = [name for name in found["tensors"] if name.startswith("model.")]
    assert [*found["tensors"]][: len(weights)] == weights
    assert weights[0] == "model.embedding.word.weight" and weights.index("model.layers.0.mlp.up.weight") < weights.index(
        "model.layers.3.attention.qkv.weight"
    )
    assert found["parameters"] == sum(math.prod(found["tensors"][name]["shape"]) for name in weights)
    entry = found["tensors"]["exp_avg.layers.1.mlp.up.weight"]
    assert (entry["shape"], entry["dtype"], entry["bytes"]) == ([128, 32], "float32", 128 * 32 * 4)
    assert entry["boxes"] == len(manifest.tensors["exp_avg.layers.1.mlp.up.weight"].slices) > 1
    for words in (
        str(manifest.content_digest),
        "iter_0000002",
        "61",
        f"{found['parameters']:,}",
        "--bf16",
        "exp_avg_sq.final_norm.bias",
    ):
        assert words in text
    assert json.loads(said(capsys, 0, "inspect", original, "--step", 1, "--json"))["progress"]["iteration"] == 1


def test_verify_reads_every_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, 0, "verify", saved)
    assert text.count(" is sound: ") == 2 and str(read_manifest(checkpoint(saved, 1)).content_digest) in text
    assert said(capsys, 0, "verify", saved, "--step", 1).count("\n") == 1
    assert "no checkpoint of iteration 7" in failed(capsys, 1, "verify", saved, "--step", 7)
    assert "holds no checkpoint" in failed(capsys, 1, "verify", saved.parent / "none")


def test_verify_names_all_that_is_wrong(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = checkpoint(saved, 1), checkpoint(saved, 2)
    boxes = read_manifest(first).tensors["exp_avg.layers.1.mlp.up.weight"].slices
    with DataFileReader(LocalStorage(first), read_manifest(first)) as files:
        places = [(first / box.file, files.get_data_offset(box, "float32")) for box in boxes]
    for file, at in places:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
    (first / "config.json").write_text("{}")
    (second / "rank_00000.safetensors").unlink()
    (saved / "latest_checkpointed_iteration.txt").write_text("9\n")
    lines = said(capsys, 1, "verify", saved).splitlines()
    assert "latest_checkpointed_iteration.txt names 9, which is not there" in lines[0]
    at = lines.index(f"{second} is damaged:")
    of_first, of_second = lines[1:at], lines[at + 1 :]
    assert of_first[0] == f"{first} is damaged:"
    assert len(boxes) > 1
    for box in boxes:
        altered = f"the data of {box.key} was altered: its checksum does not match the manifest; copy the file again"
        assert f"  {first / box.file}: {altered}" in of_first
    assert any("config.json" in line for line in of_first)
    assert of_second == [f"  {second / 'rank_00000.safetensors'} is missing; copy the file again"]


def test_verify_compares_the_content(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file as it was written, but not what was to be saved: the checksums agree, the content hashes do not."""
    path = checkpoint(saved, 2)
    text = (path / "manifest.json").read_text()
    manifest = read_manifest(path)
    name = "model.final_norm.weight"
    other = manifest.tensors["model.final_norm.bias"].content
    content = json.loads(text)
    content["tensors"][name]["content"] = other
    entries = (f"{name} {t['shape']} {t['dtype']} {t['content']}" for name, t in content["tensors"].items())
    content["content_digest"] = digest_entries(entries)
    (path / "manifest.json").write_text(json.dumps(content))
    assert f"{name}: its content hash is" in said(capsys, 1, "verify", path)


def test_diff(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = checkpoint(original, 1), checkpoint(original, 2)
    assert "156 tensors are the same, 0 differ" in said(capsys, 0, "diff", two, original)
    found = json.loads(said(capsys, 1, "diff", one, two, "--json"))
    assert found["kinds"] == ["model", "exp_avg", "exp_avg_sq"]
    assert len(found["different"]) == 156 and next(iter(found["different"])) == "model.embedding.word.weight"
    name = "model.layers.2.mlp.up.weight"

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 1] += 0.5
        tensor[7, 30] -= 2.0
        return tensor

    other = changed(two, tmp_path / "other", name, change)
    gap = json.loads(said(capsys, 1, "diff", two, other, "--json"))["different"]
    assert gap.keys() == {name}
    assert gap[name]["first"]["index"] == [3, 1] and gap[name]["largest"]["index"] == [7, 30] and gap[name]["elements"] == 2
    assert gap[name]["absolute"] == pytest.approx(2.0)
    tensor = StoredCheckpoint(two).read_stored(name).double()
    assert gap[name]["relative"] == pytest.approx(math.sqrt(4.25) / float(tensor.norm()), rel=1e-5)
    text = said(capsys, 1, "diff", two, other)
    assert f"first difference: {name} [3, 1]" in text and "155 tensors are the same, 1 differ" in text
    assert said(capsys, 0, "diff", two, other, "--tolerance", 1e9)
    assert "there is no such folder" in failed(capsys, 2, "diff", two, tmp_path / "none")


def test_diff_of_what_only_one_has(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without moments on one side only weights are compared; a tensor of another shape is told, not read."""
    source = StoredCheckpoint(checkpoint(original, 2))
    tensors = {name: tensor for name, tensor in source.tensors.items() if name.startswith("model.")}
    del tensors["model.final_norm.bias"]
    write_checkpoint(tmp_path / "part", 2, tensors, source.read_stored, source.config, source.state)
    found = json.loads(said(capsys, 1, "diff", original, tmp_path / "part", "--json"))
    assert (found["kinds"], found["only_in_a"], found["only_in_b"]) == (["model"], ["model.final_norm.bias"], [])
    text = said(capsys, 1, "diff", tmp_path / "part", original)
    assert "only in b: model.final_norm.bias" in text


@given(st.lists(st.sampled_from([0.0, 1.0, -2.0, math.nan, math.inf]), min_size=1, max_size=9), st.data())
def test_the_difference_of_two_tensors(values: list[float], data: st.DataObject) -> None:
    others = [data.draw(st.sampled_from([value, value, 3.0, math.nan])) for value in values]
    same = [a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, others, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_BLOCK_NUMEL", 2)
        found = compare_tensors(torch.tensor(values), torch.tensor(others).double())
    if all(same):
        assert found is None
        return
    assert found is not None and found.num_different == same.count(False) and found.first_difference.index == (same.index(False),)
    gaps = [0.0 if s else (abs(a - b) if math.isfinite(a - b) else math.inf) for a, b, s in zip(values, others, same, strict=True)]
    assert found.max_abs_difference == max(gaps) and gaps[found.max_difference.index[0]] == max(gaps)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (["--tp", 4, "--pp", 2], ["01"] * 4 + ["23"] * 4),
        pytest.param(["--tensor-model-parallel-size", 2], ["0123"] * 2, marks=pytest.mark.full("the first case")),
        (["--pp", 2, "--num-virtual-stages-per-pipeline-rank", 2], ["02", "13"]),
        (["--pp", 2, "--decoder-first-pipeline-num-layers", 3], ["012", "3"]),
    ],
)
def test_reshard(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[Any], layers: list[str]) -> None:
    """A file for each rank with the layers of its stage; the same content, moments too."""
    ranks = len(layers)
    text = said(capsys, 0, "reshard", original, tmp_path / "cut", *flags)
    before, after = (read_manifest(checkpoint(folder, 2)) for folder in (original, tmp_path / "cut"))
    assert f"files of {ranks} ranks, content digest {before.content_digest}, as before" in text
    assert after.content_digest == before.content_digest and after.tensors.keys() == before.tensors.keys()
    assert sorted(name for name in after.files if name.startswith("rank_")) == [f"rank_{r:05d}.safetensors" for r in range(ranks)]
    found: dict[str, set[str]] = {}
    for name, tensor in after.tensors.items():
        for box in tensor.slices if ".layers." in name else ():
            found.setdefault(box.file, set()).add(name.split(".")[2])
    assert ["".join(sorted(found[file])) for file in sorted(found)] == layers
    assert "0 differ" in said(capsys, 0, "diff", original, tmp_path / "cut")
    assert said(capsys, 0, "verify", tmp_path / "cut")
    assert "exists already" in failed(capsys, 1, "reshard", original, tmp_path / "cut", *flags)


@pytest.mark.full("test_run_experts.py::test_files_are_cut_as_the_ranks_hold_experts")
def test_a_resharded_checkpoint_has_the_boxes_that_its_ranks_save(original: Path, tmp_path: Path) -> None:
    """A run at the layout, which loads it and saves it as it is, writes the same boxes."""
    assert main(["reshard", str(original), str(tmp_path / "cut"), "--tp", "2", "--pp", "2"]) == 0
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4, "bf16": True}
    settings = {"train_iters": 3, "iterations_to_skip": (3,), "override_opt_param_scheduler": True}
    run(arguments(**layout, **settings, load=tmp_path / "cut", save=tmp_path / "run"), 4)
    cut, own = read_manifest(checkpoint(tmp_path / "cut", 2)), read_manifest(checkpoint(tmp_path / "run", 3))
    for name, tensor in own.tensors.items():
        assert {(box.tensor_slice, box.checksum) for box in tensor.slices} == {
            (box.tensor_slice, box.checksum) for box in cut.tensors[name].slices
        }, name


def test_layouts_that_are_not_possible(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        (["--tp", 3], "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"),
        (["--pp", 5], "--pipeline-model-parallel-size"),
        (["--tp", 0], "--tensor-model-parallel-size"),
        (["--pipeline-schedule", "nosuch"], "--pipeline-schedule"),
    ):
        assert words in failed(capsys, 1, "reshard", original, tmp_path / "cut", *flags)
        assert not (tmp_path / "cut").exists()
