"""Chat templates in the files of a tokenizer: chat_template.jinja and additional_chat_templates/, which transformers writes since
version 4.52, and the field chat_template of tokenizer_config.json, which every version reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.regular_file import read_text
from megatron_lab.tokenizers.bpe_rules import read_json
from megatron_lab.tokenizers.file_names import TOKENIZER_CONFIG

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"
"""Name of the template that formats a conversation if the caller names none."""
_FIELD = "chat_template"


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name, as transformers reads them; the main template has the name `default`.

    The jinja files count, if there is one. Otherwise the field of tokenizer_config.json counts, which contains one template or a
    list of named templates.

    Raises:
        ValueError: tokenizer_config.json is damaged, or its field has another form.
    """
    files = {DEFAULT_TEMPLATE: folder / TEMPLATE_FILE} | {
        path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    }
    if templates := {name: read_text(path) for name, path in files.items() if path.is_file()}:
        return templates
    config = folder / TOKENIZER_CONFIG
    content = read_json(config, str(config), "a JSON object") if config.is_file() else {}
    field = content.get(_FIELD) if isinstance(content, dict) else None
    if isinstance(field, str):
        return {DEFAULT_TEMPLATE: field}
    named: dict[str, str] = {}
    for entry in field if isinstance(field, list) else [] if field is None else [field]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"{config}: {_FIELD} has {str(entry)[:60]}, but must be a text, or a list of objects with the texts name and "
                "template. Correct the file"
            )
        named[name] = text
    return named


def write_chat_templates(folder: Path, templates: Mapping[str, str]) -> dict[str, Any]:
    """Write the jinja files of chat templates, and return the field with the same templates for tokenizer_config.json.

    Args:
        folder: folder of the tokenizer.
        templates: templates by name, from `read_chat_templates`.
    """
    for name, text in templates.items():
        path = folder / TEMPLATE_FILE if name == DEFAULT_TEMPLATE else folder / TEMPLATE_FOLDER / f"{Path(name).name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    if set(templates) == {DEFAULT_TEMPLATE}:
        return {_FIELD: templates[DEFAULT_TEMPLATE]}
    return {_FIELD: [{"name": name, "template": text} for name, text in templates.items()]} if templates else {}
