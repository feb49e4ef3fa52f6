"""The layout string: what is written is what is read, and what is wrong is told by its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.pipeline_layout import LayoutChunk, find_layout_problems, parse_layout

Written = tuple[str, str]
"""A text and what it stands for without repeats and brackets."""

SPACE = st.sampled_from(["", "", ",", " ", " , "])


def repeated(part: Written, times: int | None, space: str) -> Written:
    text, meaning = part
    return (f"{text}{space}", meaning) if times is None else (f"{text}*{times}{space}", meaning * times)


SYMBOLS = st.builds(repeated, st.sampled_from([("t", "t"), ("|", "|")]), st.none() | st.integers(0, 12), SPACE)


def bracketed(parts: list[Written], times: int | None, space: str) -> Written:
    text, meaning = (joined(parts)[i] for i in (0, 1))
    return repeated((f"({text})", meaning), times, space)


def joined(parts: list[Written]) -> Written:
    return "".join(text for text, _ in parts), "".join(meaning for _, meaning in parts)


def inside_brackets(parts: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    some = st.lists(parts, min_size=1, max_size=4).filter(lambda parts: joined(parts)[1] != "")
    return st.builds(bracketed, some, st.none() | st.integers(0, 4), SPACE)


PARTS = st.recursive(SYMBOLS, inside_brackets, max_leaves=8)


@given(st.lists(PARTS, max_size=5))
def test_what_is_written_is_read(parts: list[Written]) -> None:
    text, meaning = joined([("E", "E"), *parts, ("L", "L")])
    chunks = meaning.split("|")
    assert parse_layout(text) == tuple(
        LayoutChunk(i == 0, chunk.count("t"), i == len(chunks) - 1) for i, chunk in enumerate(chunks)
    )


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*3|(tt|)*6L", [3, 2, 2, 2, 2, 2, 2, 0]),
        ("E|(t|)*3,t|t||L", [0, 1, 1, 1, 1, 1, 0, 0]),
        ("Ettt|tt,tt|tL", [3, 4, 1]),
        ("Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L", [6, 6, 6, 5, 5, 5, 5, 5]),
        ("Et(t|t)*2|L", [2, 2, 1, 0]),
        ("E(t*2|)*3L", [2, 2, 2, 0]),
        ("E((t|)*2,tt|)*2 L", [1, 1, 2, 1, 1, 2, 0]),
        ("E|*3tL", [0, 0, 0, 1]),
        ("Et,*2L", [2]),
        ("Et*10L", [10]),
        ("Et*0L", [0]),
        ("Et*000000000000003L", [3]),
        (" E t\nt | L ", [2, 0]),
        ("EL", [0]),
        ("Et*2|tmL", [2, 1]),
        ("Et*2|m*3,L", [2, 0]),
    ],
)
def test_layouts_by_hand(text: str, layers: list[int]) -> None:
    chunks = parse_layout(text)
    assert [chunk.num_layers for chunk in chunks] == layers
    assert [chunk.has_embedding for chunk in chunks] == [True] + [False] * (len(layers) - 1)
    assert [chunk.has_loss for chunk in chunks] == [False] * (len(layers) - 1) + [True]
    assert [chunk.num_depths for chunk in chunks] == [0] * (len(layers) - 1) + [3 if "m*3" in text else text.count("m")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "Et*3|(tq|)*2L",
            "Character 8 of the pipeline layout is 'q'. Use only E (embedding), t (layer), m (multi-token prediction), L (loss), |",
        ),
        ("Et|TL", "Character 4 of the pipeline layout is 'T' (write t)"),
        ("et|L", "Character 1 of the pipeline layout is 'e' (write E)"),
        ("Et|(t|L", "The bracket at character 4 of the pipeline layout is not closed. Add a closing bracket."),
        ("Et|((t|)*2L", "The bracket at character 4 of the pipeline layout is not closed. Add a closing bracket."),
        ("Et|t)*2L", "Character 5 of the pipeline layout closes a bracket that was not opened. Remove this bracket."),
        ("Et()*2|L", "The bracket at character 3 of the pipeline layout is empty. Remove this bracket."),
        ("Et*|L", "Character 3 of the pipeline layout is '*' without a number after it"),
        ("Et* 3|L", "Character 3 of the pipeline layout is '*' without a number after it"),
        ("*3EtL", "Character 1 of the pipeline layout is '*' without a symbol or bracket before it"),
        ("Et*2*3|L", "Character 5 of the pipeline layout is '*' without a symbol or bracket before it"),
        ("Et(*2)|L", "Character 4 of the pipeline layout is '*' without a symbol or bracket before it"),
        ("Et(t|)29L", "Character 7 of the pipeline layout is '2' (a number is allowed only after *)"),
        ("Et*1,0|L", "Character 6 of the pipeline layout is '0' (a number is allowed only after *)"),
        ("[Et|L]", "Character 1 of the pipeline layout is '['"),
        ("Et*100001L", "The repetition at character 3 makes the pipeline layout longer than 100,000 symbols. Repeat less often."),
        (
            "E((((t*99)*99)*99)*99)*99L",
            "The repetition at character 15 makes the pipeline layout longer than 100,000 symbols. Repeat less often.",
        ),
        (
            "Et*" + "9" * 5000 + "L",
            "The repetition at character 3 makes the pipeline layout longer than 100,000 symbols. Repeat less often.",
        ),
        ("(" * 5000, "The bracket at character 5000 of the pipeline layout is not closed. Add a closing bracket."),
    ],
)
def test_what_cannot_be_read(text: str, problem: str) -> None:
    (only,) = find_layout_problems(text)
    assert only.startswith(problem)
    with pytest.raises(ValueError) as caught:
        parse_layout(text)
    assert only in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            "",
            [
                "There is no E: the embedding must be first in the first chunk.",
                "There is no L: the loss must be last in the last chunk.",
            ],
        ),
        ("t|tL", ["There is no E: the embedding must be first in the first chunk."]),
        ("tE|L", ["E is at character 2, but the embedding must be first in the first chunk."]),
        ("|EtL", ["E is at character 2, but the embedding must be first in the first chunk."]),
        ("Et|Lt", ["L is at character 4, but the loss must be last in the last chunk."]),
        ("Et|tL|", ["L is at character 5, but the loss must be last in the last chunk."]),
        ("Et|E,tL", ["There are 2 E (characters 1, 4) but one embedding."]),
        ("(Et|)*3L", ["There are 3 E (character 2) but one embedding."]),
        ("Et|L*2", ["There are 2 L (character 4) but one loss."]),
        (
            "Et*3|(tt|)*29,m|m|mL",
            ["m (multi-token prediction) is at characters 15, 17, but it must be before L, in the last chunk."],
        ),
        (
            "tE|m|Lt",
            [
                "m (multi-token prediction) is at character 4, but it must be before L, in the last chunk.",
                "E is at character 2, but the embedding must be first in the first chunk.",
                "L is at character 6, but the loss must be last in the last chunk.",
            ],
        ),
    ],
)
def test_all_that_is_misplaced_is_told(text: str, problems: list[str]) -> None:
    assert find_layout_problems(text) == problems
    with pytest.raises(ValueError) as caught:
        parse_layout(text)
    assert all(problem in str(caught.value) for problem in problems)
