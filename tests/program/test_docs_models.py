"""The flags that docs/models.md gives for a family make a model of that family, and its tables are whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError
from megatron.config.cli import parse
from megatron.config.flags import find_flag
from megatron_lab.foreign.huggingface.families import CONVERTIBLE, FAMILIES, UNSUPPORTED
from megatron_lab.foreign.huggingface.family import compute_signature
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from tests.support.cli import ROOT
from tests.support.family_tables import LLAMA_FLAGS, SIZES, published_models, rewrite, spell

PAGE = (ROOT / "docs/models.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    table = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(f"## {heading}") :], re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()]


def spelled(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_the_tables_are_those_of_the_code() -> None:
    """To renew them: python -m tests.support.family_tables."""
    assert rewrite(PAGE) == PAGE


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_the_flags_of_a_family_make_its_first_published_model(family: str) -> None:
    """With the flags of its sizes."""
    _, _, *found = rows("Flags of each family")
    assert [spelled(row[0])[0] for row in found] == list(CONVERTIBLE)
    block = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None and block[1].strip() == LLAMA_FLAGS
    (words,) = (row[3] for row in found if spelled(row[0]) == [family])
    flags = "" if "not the Llama flags" in words else " ".join([LLAMA_FLAGS, *spelled(words)])
    model = next(iter(published_models()[family].values()))
    sizes = [spell(name, getattr(model, name)) for name in SIZES if getattr(model, name) is not None]
    assert compute_signature(parse(f"{flags} {' '.join(sizes)}".split()).model) == compute_signature(model)


def test_every_family_has_a_column() -> None:
    head, _, *found = rows("Features of each family")
    assert head[2:] == list(CONVERTIBLE) and all(len(row) == len(head) for row in found)


def test_what_is_missing_is_told_on_the_page_and_by_an_import(tmp_path: Path) -> None:
    _, _, *found = rows("Unsupported families")
    assert sorted(name for row in found for name in spelled(row[0])) == sorted(
        [*UNSUPPORTED, *(FAMILIES.keys() - set(CONVERTIBLE))]
    )
    for name, lacking in UNSUPPORTED.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(CheckpointError) as error:
            HuggingFaceFolder(tmp_path)
        assert f"'{name}'" in str(error.value) and f"since it has {lacking}. Choose a model of a supported type: gpt2" in str(
            error.value
        )


def test_flags_exist() -> None:
    words = set(re.findall(r"--[a-z][a-z0-9-]+", PAGE)) - {"--family"}
    assert len(words) > 20 and not [word for word in words if find_flag(word.removeprefix("--")) is None]
