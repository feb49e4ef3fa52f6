"""Add to the site what lies outside of docs/: README.md as its first page, the other pages of the top folder and that of the tests,
a page of the reference for each public module, and files of the repository that pages link to, so that a link works on the site as
it does where the repository is read.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "megatron.api",
    "megatron_lab.foreign.source",
    "megatron.data.indexed_dataset",
    "megatron.data.indexed_writer",
    "megatron_lab.inference.forward",
    "megatron_lab.inference.generate",
    "megatron.parallel.topology",
    "megatron.spec.operations",
    "megatron.spec.schedules",
    "megatron_lab.planner.plan",
)
"""Modules that other programs may build on, one page each. That of `megatron.api` has all its names, wherever they are defined."""
FILES = "files"
"""Folder of the site for files of the repository."""
REFERENCE = "reference"
STYLE = """.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) code { word-break: normal; overflow-wrap: anywhere; }
"""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_RANKS = re.compile(r'<autoref [^>]*?identifier="([\d, ]+)"[^>]*>(.*?)</autoref>')
_LIST = re.compile(r"(?:[-*] |\d+\. )")


def outer_pages() -> dict[str, Path]:
    """Return the files outside of docs/ that are pages of the site, by their names there."""
    top = {"index.md" if path.name == "README.md" else path.name: path for path in sorted(ROOT.glob("*.md"))}
    return top | {"tests.md": ROOT / "tests" / "README.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add what is made here to the menu, and the pages that the menu does not name yet."""
    named = set(_named(config.nav))
    rest = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named)
    assert config.nav is not None
    if rest:
        config.nav.insert(2, {"More": rest})
    if others := [name for name in outer_pages() if name != "index.md"]:
        config.nav.append({"Project": others})
    config.nav.append({"Reference": [{name: f"{REFERENCE}/{name}.md"} for name in PUBLIC]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    pages = {name: path.read_text(encoding="utf-8").replace("](docs/", "](") for name, path in outer_pages().items()}
    pages["site.css"] = STYLE
    for name in PUBLIC:
        pages[f"{REFERENCE}/{name}.md"] = f"# {name}\n\n::: {name}\n"
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for page, text in texts.items():
        for _, target in _outside(page, text):
            place = _on_site(target)
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the copies, and part lists from the paragraph above, as other readers of Markdown do."""
    uri = page.file.src_uri
    for link, target in [*_outside(uri, markdown)]:
        place = posixpath.relpath(_on_site(target), posixpath.dirname(uri) or ".")
        markdown = re.sub(rf"\]\({re.escape(link)}(?=[#)])", f"]({place}", markdown)
    return "\n".join(_parted(markdown.split("\n")))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Groups of ranks side by side, [0, 1] [2, 3], are no links; and a docstring's "::" before an example is a colon."""
    return _RANKS.sub(r"[\2] [\1]", html).replace("::</p>", ":</p>")


def _on_site(target: str) -> str:
    """Where a file of the repository lies on the site."""
    on_top = {path: name for name, path in outer_pages().items()}
    return on_top.get(ROOT / target, f"{FILES}/{target}")


def _outside(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Links of a page to files of the repository outside of docs/, each with the path of its file from the root."""
    for found in _LINK.finditer(text):
        link = found[2]
        source = outer_pages().get(page, ROOT / "docs" / page)
        target = posixpath.normpath(posixpath.join(source.parent.relative_to(ROOT).as_posix(), link))
        if page in outer_pages() and not link.startswith("..") and (ROOT / "docs" / link).exists():
            continue  # its docs/ was taken off
        if not target.startswith(("docs/", "..")) and (ROOT / target).is_file():
            yield link, target


def _parted(lines: list[str]) -> Iterator[str]:
    fenced, before = False, ""
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and _LIST.match(line) and before.strip() and not (_LIST.match(before) or before.startswith(" ")):
            yield ""
        yield line
        before = line


def _named(nav: Any) -> Iterator[str]:
    """Pages that the menu names."""
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else [nav]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _named(entry)
