"""Figures of timelines: every operation in its place, in colours that can be told apart."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from megatron.spec.operations import OpType
from megatron_lab.schedule_plots.files import write_picture
from megatron_lab.schedule_plots.panel import NUM_SHADES, Colour, Panel, get_colour
from tests.support.timelines import panel

F, R, B, I, W = OpType.FORWARD, OpType.RECOMPUTE, OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD


# ---- colours

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: linear RGB to what is seen.
SIGHT = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour: Colour, sight: str) -> tuple[float, float, float]:
    """CIELAB of what an eye sees."""
    linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in (part / 255 for part in colour)]
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in SIGHT[sight])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    ("kinds", "shades"),
    [((F, B), NUM_SHADES), ((F, R, B), 3), ((F, R, I, W), 2)],
    ids=["F B, 4 chunks", "F R B, 3 chunks", "F R I W, 2 chunks"],
)
def test_colours_of_a_schedule_can_be_told_apart(kinds: tuple[OpType, ...], shades: int, sight: str) -> None:
    """A difference of about 2 in CIELAB can just be seen side by side."""
    colours = [seen(get_colour(kind, depth), sight) for kind in kinds for depth in range(shades)]
    distances = [sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5 for a, b in itertools.combinations(colours, 2)]
    assert min(distances) > 12


def test_text_on_a_colour_can_be_read() -> None:
    """Contrast of at least 3 (WCAG 2, large text) with the black or white that is chosen."""

    def light(colour: Colour) -> float:
        levels = (part / 255 for part in colour)
        linear = (level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels)
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for kind, depth in itertools.product(OpType, range(NUM_SHADES)):
        colour = get_colour(kind, depth)
        text = Colour(255, 255, 255) if colour.is_dark else Colour(0, 0, 0)
        dark, bright = sorted((light(colour), light(text)))
        assert (bright + 0.05) / (dark + 0.05) >= 3, (kind, depth)


# ---- figures

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in svg.iter(f"{SVG}text")]


def boxes_of(svg: ElementTree.Element) -> list[tuple[float, float, str]]:
    """Left edge, width and colour of every operation."""
    found = []
    for group in svg.iter(f"{SVG}g"):
        if group.get("id", "").startswith("PolyCollection"):
            for path in group.iter(f"{SVG}path"):
                across = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path.get("d", ""))]
                colour = re.search(r"fill: (#\w+)", path.get("style", ""))
                assert colour is not None
                found.append((min(across), max(across) - min(across), colour[1]))
    return found


def draw_svg(panels: list[Panel], folder: Path) -> ElementTree.Element:
    write_picture(panels, folder / "picture.svg")
    return ElementTree.parse(folder / "picture.svg").getroot()


def test_a_figure_has_every_operation_its_number_and_its_words(tmp_path: Path) -> None:
    drawn = panel("zb-v", 3, 6)
    svg = draw_svg([drawn], tmp_path)
    texts, ops = texts_of(svg), [span.op for spans in drawn.timeline.spans for span in spans]
    assert len(boxes_of(svg)) == len(ops) == 108
    assert sum(text.isdigit() for text in texts) == len(ops) + sum(text.isdigit() for text in texts[: texts.index("time (ms)")])
    words = {text for text in texts if not text.isdigit()}
    assert words == {
        *(f"stage {stage}" for stage in range(3)),
        drawn.caption,
        "time (ms)",
        "forward",
        "input gradient",
        "weight gradient",
        "1st chunk of a stage",
        "2nd chunk of a stage",
    }
    assert drawn.caption == "zb-v: step 190 ms, bubble 5.3%"
    assert {colour for _, _, colour in boxes_of(svg)} == {get_colour(kind, depth).hex for kind in (F, I, W) for depth in (0, 1)}


def test_recompute_has_its_colour_and_its_word(tmp_path: Path) -> None:
    svg = draw_svg([panel("1f1b", 2, 3, recompute=5)], tmp_path)
    assert [text for text in texts_of(svg) if text in ("forward", "recompute", "backward")] == ["forward", "recompute", "backward"]
    widths = {colour: {round(width, 1) for _, width, of in boxes_of(svg) if of == colour} for *_, colour in boxes_of(svg)}
    (again,), (forward,) = (widths[get_colour(kind, 0).hex] for kind in (R, F))
    assert again == pytest.approx(forward / 2, abs=0.1)


def test_panels_of_a_figure_share_one_axis(tmp_path: Path) -> None:
    """The same operation is at the same place and as wide in a panel that is shorter."""
    both = draw_svg([panel("gpipe", 2, 3), panel("gpipe", 2, 2)], tmp_path)
    boxes = [(round(left, 2), round(width, 2), colour) for left, width, colour in boxes_of(both)]
    lengths = {width for _, width, colour in boxes if colour == get_colour(F, 0).hex}
    assert len(boxes) == 20 and len(lengths) == 1
    forwards = sorted(left for left, _, colour in boxes if colour == get_colour(F, 0).hex)
    assert forwards.count(forwards[0]) == 2 and forwards.count(forwards[-1]) == 1


def test_a_long_figure_is_wide_and_leaves_numbers_out_at_last(tmp_path: Path) -> None:
    widths = {}
    for microbatches in (8, 64, 300):
        svg = draw_svg([panel("1f1b", 1, microbatches)], tmp_path)
        widths[microbatches] = float(svg.get("width", "").removesuffix("pt"))
        texts = texts_of(svg)
        assert (str(microbatches - 1) in texts) == (microbatches < 300)
    assert widths[8] < widths[64] < widths[300] == 50 * 72


def test_a_figure_is_the_same_every_time(tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        write_picture([panel("interleaved", 2, 2, 2)], tmp_path / f"a.{suffix}")
        with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20}):
            write_picture([panel("interleaved", 2, 2, 2)], tmp_path / f"b.{suffix}")
            assert matplotlib.rcParams["font.size"] == 20
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    svg = (tmp_path / "a.svg").read_text()
    assert "dc:date" not in svg and "matplotlib.org" not in svg
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_fifth_chunk_looks_as_the_first(tmp_path: Path) -> None:
    texts = texts_of(draw_svg([panel("interleaved", 2, 2, 5)], tmp_path))
    assert "1st, 5th chunk of a stage" in texts and "4th chunk of a stage" in texts


def test_without_matplotlib_the_rest_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    for suffix in ("svg", "png"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install -e .*\[matplotlib\]"):
            write_picture([panel("1f1b", 2, 2)], tmp_path / f"a.{suffix}")
    for suffix in ("json", "txt"):
        write_picture([panel("1f1b", 2, 2)], tmp_path / f"a.{suffix}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.txt"]
