"""The flags that docs/models.md gives for a family make a model of that family, and its tables are whole."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError
from megatron.config.cli import parse
from megatron.config.flags import find_flag
from megatron_lab.checkpoints import export
from megatron_lab.foreign.huggingface.families import FAMILIES, UNSUPPORTED, select_family
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.huggingface.groups import UnsupportedFields
from tests.support.cli import ROOT

PAGE = (ROOT / "docs/models.md").read_text()
NAMES = [
    name for name, family in FAMILIES.items() if not any(isinstance(group, UnsupportedFields) for group in family.field_groups)
]
"""Families of which there are models that can be built."""
SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    table = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(f"## {heading}") :], re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()]


def spelled(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_the_flags_of_a_family_make_a_model_that_fits_it() -> None:
    _, _, *found = rows("Flags of each family")
    assert [spelled(row[0])[0] for row in found] == NAMES == list(export.FAMILIES)
    block = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    llama = shlex.split(block[1])
    own: dict[str, list[str]] = {}
    for name, _, flags in found:
        (family,) = spelled(name)
        own[family] = [word for part in spelled(flags) for word in (shlex.split(part) if part.startswith("--") else own[part])]
        words = [] if family == "gpt2" else [*llama, *own[family]]
        assert select_family(parse([*SIZES.split(), *words]).model, family).model_type == family
        if family not in ("gpt2", "llama", "ministral3"):  # without its scale of queries, Ministral 3 is a Llama
            assert FAMILIES["llama"].describe_mismatches(parse([*SIZES.split(), *words]).model), "the flags make no difference"


def test_every_family_has_a_column() -> None:
    head, _, *found = rows("Features of each family")
    assert head[2:] == NAMES and all(len(row) == len(head) for row in found)


def test_what_is_missing_is_told_on_the_page_and_by_an_import(tmp_path: Path) -> None:
    _, _, *found = rows("Unsupported families")
    assert sorted(name for row in found for name in spelled(row[0])) == sorted([*UNSUPPORTED, *(FAMILIES.keys() - NAMES)])
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
