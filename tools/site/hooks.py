"""MkDocs hooks that add pages and files from outside of docs/ to the documentation site.

The hooks add README.md as the first page, the other pages of the top folder, the page about the tests, and a reference page for
each public module. They also add files of the repository that pages link to, so that a link works on the site as in the repository.
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
PUBLIC_MODULES = (
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
"""Modules of the public interface, with one reference page each. The page of `megatron.api` contains all its names, wherever
they are defined."""
FILES_FOLDER = "files"
"""Folder of the site for files of the repository."""
REFERENCE_FOLDER = "reference"
WORKER_SHIM = "iframe-worker.js"
"""Script for the search in pages that are opened as files."""
STYLE = """.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) code { word-break: normal; overflow-wrap: anywhere; }
.md-typeset .language-output pre > code { white-space: pre-wrap; overflow-wrap: anywhere; }
.md-typeset .language-output .go { color: inherit; }
"""
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
_RANKS = re.compile(r'<autoref [^>]*?identifier="([\d, ]+)"[^>]*>(.*?)</autoref>')
_LIST = re.compile(r"(?:[-*] |\d+\. )")


def list_outer_pages() -> dict[str, Path]:
    """Return the files of the site's pages that are outside of docs/, by the name of the page on the site."""
    top = {"index.md" if path.name == "README.md" else path.name: path for path in sorted(ROOT.glob("*.md"))}
    return top | {"tests.md": ROOT / "tests" / "README.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add generated pages, and pages that the navigation does not list, to the navigation."""
    named_pages = set(_named_pages(config.nav))
    unnamed_pages = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named_pages)
    assert config.nav is not None
    if unnamed_pages:
        config.nav.insert(2, {"More": unnamed_pages})
    if project_pages := [name for name in list_outer_pages() if name != "index.md"]:
        config.nav.append({"Project": project_pages})
    config.nav.append({"Reference": [{name: f"{REFERENCE_FOLDER}/{name}.md"} for name in PUBLIC_MODULES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and files of the repository that pages link to."""
    from mkdocs.structure.files import File

    pages = {name: path.read_text(encoding="utf-8").replace("](docs/", "](") for name, path in list_outer_pages().items()}
    pages["site.css"] = STYLE
    pages[WORKER_SHIM] = (Path(__file__).parent / WORKER_SHIM).read_text(encoding="utf-8")
    for name in PUBLIC_MODULES:
        pages[f"{REFERENCE_FOLDER}/{name}.md"] = f"# {name}\n\n::: {name}\n"
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    page_texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for page, text in page_texts.items():
        for _, target in _links_outside_docs(page, text):
            path_on_site = _site_path(target)
            if files.get_file_from_path(path_on_site) is None:
                files.append(File.generated(config, path_on_site, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change the text of a page for the site.

    Put the recipes first on the first page. Point links to files outside of docs/ to their copies on the site. Insert an empty line
    between a paragraph and a list below it, because MkDocs does not recognise the list otherwise.
    """
    uri = page.file.src_uri
    if uri == "index.md":
        markdown = _move_recipes_to_start(markdown)
    for link, target in [*_links_outside_docs(uri, markdown)]:
        relative_path = posixpath.relpath(_site_path(target), posixpath.dirname(uri) or ".")
        markdown = re.sub(rf"\]\({re.escape(link)}(?=[#)])", f"]({relative_path}", markdown)
    return "\n".join(_separate_lists(markdown.split("\n")))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Repair the HTML of a page. Groups of ranks, such as [0, 1] [2, 3], must not become links. A "::" before an example must
    become a colon."""
    return _RANKS.sub(r"[\2] [\1]", html).replace("::</p>", ":</p>")


def _move_recipes_to_start(markdown: str) -> str:
    """Move the recipes of README.md below the first paragraph. The README itself starts with the commands of the quick start."""
    match = re.search(r"^##(# Recipes\n.*?)^### Pages\n\n", markdown, re.MULTILINE | re.DOTALL)
    if match is None:
        return markdown
    markdown = markdown[: match.start()] + markdown[match.end() :]
    title, first_paragraph, remaining = markdown.split("\n\n", 2)
    return f"{title}\n\n{first_paragraph}\n\n#{match[1]}{remaining}"


def _site_path(target: str) -> str:
    """Return the path on the site of a repository file."""
    page_names = {path: name for name, path in list_outer_pages().items()}
    return page_names.get(ROOT / target, f"{FILES_FOLDER}/{target}")


def _links_outside_docs(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the links of a page to repository files outside of docs/, each with the path of its file from the root."""
    for match in _LINK.finditer(text):
        link = match[2]
        source = list_outer_pages().get(page, ROOT / "docs" / page)
        target = posixpath.normpath(posixpath.join(source.parent.relative_to(ROOT).as_posix(), link))
        if page in list_outer_pages() and not link.startswith("..") and (ROOT / "docs" / link).exists():
            continue  # a link of an outer page into docs/, whose prefix is already removed
        if not target.startswith(("docs/", "..")) and (ROOT / target).is_file():
            yield link, target


def _separate_lists(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a page, with an empty line between a paragraph and a list that follows it."""
    in_code_block, previous = False, ""
    for line in lines:
        if line.startswith("```"):
            in_code_block = not in_code_block
        if not in_code_block and _LIST.match(line) and previous.strip() and not (_LIST.match(previous) or previous.startswith(" ")):
            yield ""
        yield line
        previous = line


def _named_pages(nav: Any) -> Iterator[str]:
    """Yield the paths of the pages that the navigation of the site lists.

    Args:
        nav: navigation, or a section or page of it, as in mkdocs.yml.
    """
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else [nav]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _named_pages(entry)
