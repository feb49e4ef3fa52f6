"""Section of the report with the samples of a run (--sample-interval): how the text after a prompt changes during training."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron.metrics.history import History
from megatron_lab.pages.html import Section

_NUM_SHOWN = 10
"""Newest samples of a prompt that are shown at once. Older ones are behind a link."""
_MAX_CHARS = 4000
_TEXT_STYLE = "white-space: pre-wrap; overflow-wrap: anywhere"


def build_samples_sections(history: History) -> list[Section]:
    """Return the section with the samples of a run; an empty list if the run has none. Prompts are in the order of their file, and
    the samples of a prompt from the newest to the oldest."""
    samples_by_prompt: dict[str, list[tuple[int, str]]] = {}
    for record in reversed(history.samples):
        for sample in record["samples"]:
            samples_by_prompt.setdefault(sample.get("prompt", ""), []).append((record["iteration"], sample.get("text", "")))
    prompts = [_build_prompt(prompt, samples) for prompt, samples in samples_by_prompt.items()]
    return [Section("Samples", "\n".join(prompts))] if prompts else []


def _build_prompt(prompt: str, samples: Sequence[tuple[int, str]]) -> str:
    """Return the HTML of a prompt with its samples.

    Args:
        samples: (iteration, generated text) of each sample, newest first.
    """
    heading = escape(_shorten(prompt)) if prompt else '<span class="faint">(empty prompt)</span>'
    older = samples[_NUM_SHOWN:]
    older_html = f"<details><summary>{len(older):,} older samples</summary>{_build_rows(older)}</details>" if older else ""
    return f'<h3 style="{_TEXT_STYLE}">{heading}</h3>{_build_rows(samples[:_NUM_SHOWN])}{older_html}'


def _build_rows(samples: Sequence[tuple[int, str]]) -> str:
    rows = "".join(
        f'<tr><td class="number">{iteration:,}</td><td style="{_TEXT_STYLE}">{escape(_shorten(text))}</td></tr>'
        for iteration, text in samples
    )
    head = '<thead><tr><th class="number">iteration</th><th>text</th></tr></thead>'
    return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'


def _shorten(text: str) -> str:
    """Return a text for the page: without characters that a page cannot show, and not longer than some screens."""
    text = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."
