"""tools/plot_coordinates.py: with muP what a model computes changes as much at every width, without it more in wider ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config.cli import parse
from megatron.config.config import Config
from megatron_lab.commands import plot_coordinates
from megatron_lab.coordinates.check import fit_growth_exponent, measure_changes, scale_to_width
from tests.support.runs import arguments

RUN = {"device": "cpu", "train_iters": 10, "micro_batch_size": 4, "global_batch_size": 4, "lr": 5e-3, "num_layers": 2}


def growths(widths: Sequence[int], base: int | None, **settings: object) -> dict[str, float]:
    """By the name of what is looked at, how it grows with the width."""
    config: Config = parse(arguments(**{**RUN, **settings}))
    sizes = [measure_changes(scale_to_width(config, width, base), num_updates=3, num_seeds=2) for width in widths]
    return {name: fit_growth_exponent(widths, [one[name][-1] for one in sizes]) for name in sizes[0]}


INSIDE = {"attention of the last layer", "MLP of the last layer", "last layer", "logits"}


TIED = pytest.param({}, marks=pytest.mark.full("the other case, and tests/unit/optimizer"))


@pytest.mark.parametrize("style", [TIED, {"untie_embeddings_and_output_weights": True, "swiglu": True, "ffn_hidden_size": 64}])
def test_with_mup_changes_do_not_grow_with_the_width(style: dict[str, object]) -> None:
    widths = (32, 64, 128)
    with_mup, without = growths(widths, 32, **style), growths(widths, None, **style)
    assert with_mup.keys() == without.keys() == INSIDE | {"embedding"}
    for name in INSIDE:
        assert abs(with_mup[name]) < 0.4 < 0.6 < without[name], (name, with_mup, without)
    assert abs(with_mup["embedding"]) < 0.1


def test_sgd_has_its_own_column() -> None:
    """Of the rates in table 8 it scales others than Adam does."""
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "clip_grad": 0.0}
    widths = (32, 256)
    with_mup, without = growths(widths, 32, **sgd), growths(widths, None, **sgd)
    assert all(abs(value) < 0.4 for value in with_mup.values()), with_mup
    assert all(without[name] > 0.6 for name in INSIDE), without


def test_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = [
        *arguments(**{**RUN, "num_layers": 1}),
        "--widths",
        "32,16",
        "--updates",
        "1",
        "--seeds",
        "1",
        "--output",
        str(tmp_path / "picture.svg"),
    ]
    assert plot_coordinates.main(words) == 0
    told = capsys.readouterr().out
    assert "without muP: change" in told and "with muP: change" in told and "logits" in told
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "--widths is missing"),
        ("--widths 64", "two or more whole numbers"),
        ("--widths 32,36", "give no integer at this width"),
        ("--widths 32,64 --updates 0", "a whole number from 1 on"),
        ("--widths 32,64 --output a.txt", "the name of a picture must end in .svg or .png"),
    ],
)
def test_bad_requests(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_coordinates.main([*arguments(**RUN), *words.split()]) == 2
    assert told in capsys.readouterr().err
