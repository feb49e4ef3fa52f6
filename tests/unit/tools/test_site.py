"""What the site adds to docs/: the menu, the pages made here, and links out of docs/. (.ci/run builds it.)"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.cli import ROOT
from tools.site import hooks


def test_the_menu_names_every_page_once_and_pages_to_come_too(tmp_path: Path) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    written = [*hooks._named_pages(nav)]
    assert len(written) == len(set(written)) and all((ROOT / "docs" / name).exists() for name in written if name != "index.md")
    config: Any = SimpleNamespace(docs_dir=str(tmp_path), nav=[{"Home": "index.md"}, {"Begin": ["a.md"]}])
    for name in ("a.md", "new.md"):
        (tmp_path / name).write_text("# A page\n")
    hooks.on_config(config)
    found = [*hooks._named_pages(config.nav)]
    assert found.count("new.md") == found.count("a.md") == 1
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"} < set(found)


def test_public_modules_can_be_imported_and_say_what_they_are() -> None:
    assert len(set(hooks.PUBLIC_MODULES)) == len(hooks.PUBLIC_MODULES)
    for name in hooks.PUBLIC_MODULES:
        assert (importlib.import_module(name).__doc__ or "").strip(), name


def test_links_out_of_docs_lead_to_copies() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    text = (
        "[x](../examples/launch.sh) [y](b.md#z) [z](../CONTRIBUTING.md#style) [l](https://a.b/c) [n](../no.py) [r](../README.md#t)"
    )
    made = hooks.on_page_markdown(text, page, None, None)  # type: ignore[arg-type]
    copies = "[x](files/examples/launch.sh) [y](b.md#z) [z](CONTRIBUTING.md#style)"
    assert made == f"{copies} [l](https://a.b/c) [n](../no.py) [r](index.md#t)"
    page.file.src_uri = "index.md"  # README.md, whose links to docs/ are taken as they lie there
    made = hooks.on_page_markdown("[a](tour.md) [b](LICENSE)", page, None, None)  # type: ignore[arg-type]
    assert made == "[a](tour.md) [b](files/LICENSE)"


def test_the_first_page_offers_the_recipes_first() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    made = hooks.on_page_markdown(readme, page, None, None)  # type: ignore[arg-type]
    assert re.findall(r"^##+ .*$", made, re.MULTILINE)[:2] == ["## Recipes", "## Why use it"] and "### Pages" not in made
    assert 0 < made.index("](recipes/index.md)") < made.index("](recipes/loss_spike.md)") < made.index("![") < made.index("```bash")
    assert sorted(re.findall(r"\]\(([^)]*)\)", made)) == sorted(
        re.findall(r"\]\(([^)]*)\)", readme.replace("](LICENSE", "](files/LICENSE"))
    )


def test_pages_that_are_opened_as_files_have_a_search() -> None:
    """The plugin puts the index into a script, and loads the worker from a server unless the site has one of this name."""
    settings = yaml.safe_load(re.sub(r"^.*!!python.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    names = [name for plugin in settings["plugins"] for name in ([plugin] if isinstance(plugin, str) else plugin)]
    assert names.index("search") < names.index("offline")
    assert settings["extra"]["polyfills"] == [hooks.WORKER_SHIM] and "iframe-worker" in hooks.WORKER_SHIM
    assert (ROOT / "tools/site" / hooks.WORKER_SHIM).exists() and settings["theme"]["font"] is False


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("text:\n- a\n- b", "text:\n\n- a\n- b"),
        ("- a\n  more\n- b", "- a\n  more\n- b"),
        ("```\ntext\n- a\n```", "```\ntext\n- a\n```"),
    ],
)
def test_a_list_is_parted_from_the_text_above(written: str, read: str) -> None:
    assert "\n".join(hooks._separate_lists(written.split("\n"))) == read


def test_groups_of_ranks_are_no_links() -> None:
    made = '<td><autoref optional identifier="2, 3" class="x">0, 1</autoref> and groups::</p>'
    assert hooks.on_page_content(made, None, None, None) == "<td>[0, 1] [2, 3] and groups:</p>"  # type: ignore[arg-type]


def test_the_page_for_changes_names_every_package_and_tests_that_are_there() -> None:
    rows = [line.split("|") for line in (ROOT / "AGENTS.md").read_text().splitlines() if line.startswith("| `")]
    named = {path for row in rows for path in re.findall(r"`(megatron/\w+)/`", row[1])}
    assert named == {f"megatron/{path.name}" for path in (ROOT / "megatron").iterdir() if (path / "__init__.py").exists()}
    for row in rows:
        proofs = re.findall(r"`(tests/[\w/.]+)`", row[2])
        assert proofs and all((ROOT / path).exists() for path in proofs), row
