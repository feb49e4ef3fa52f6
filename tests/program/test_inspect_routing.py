"""tools/inspect_routing.py: which experts a model uses, in words, in JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_lab.commands.inspect_routing import LayerUsage, main
from megatron_lab.foreign.open_source import open_source
from tests.support.byte_dataset import FLAGS, write_bytes
from tests.support.runs import arguments, run

SETTINGS = {"num_layers": 3, "train_iters": 1, "disable_bias_linear": True, "num_experts": 6, "moe_layer_freq": "[0,1,1]"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint, and data."""
    folder = tmp_path_factory.mktemp("routing")
    prefix = write_bytes(folder / "text")
    run(arguments(**FLAGS | {"data_path": prefix}, **SETTINGS, save=folder / "save"))
    return folder / "save", prefix


def test_every_choice_is_counted(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prefix = trained
    picture = tmp_path / "routing.svg"
    words = [str(folder), "--data-path", prefix, "--samples", "7", "--device", "cpu"]
    assert main([*words, "--json", "--output", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 7 * 16 and list(found["layers"]) == ["1", "2"]
    assert all(len(counts) == 6 and sum(counts) == 7 * 16 * 2 for counts in found["layers"].values())
    assert "<svg" in picture.read_text() and "expert" in picture.read_text()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "112 tokens, each to 2 of 6 experts" in said and "layer   1  most used: " in said
    assert torch.isfinite(open_source(folder, None).read("layers.1.mlp.router.weight")).all()


def test_the_busiest_come_first() -> None:
    line = LayerUsage(3, (4, 0, 4, 8)).format_line()
    assert line == "layer   3  most used: 3 (2.00), 0 (1.00)  least: 2 (1.00), 1 (0.00)  never: 1"


def test_what_cannot_be_told(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prefix = trained
    run(arguments(train_iters=1, save=tmp_path / "dense"))
    assert main([str(tmp_path / "dense"), "--data-path", prefix]) == 1
    assert "has no layers with experts" in capsys.readouterr().err
    assert main([str(folder), "--data-path", prefix, "--seq-length", "17"]) == 1
    assert "--seq-length 17 is more than the 16 positions" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--data-path", prefix, "--samples", "0"])
    assert ended.value.code == 2
