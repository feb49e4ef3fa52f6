"""Texts of ``--model list`` and ``--recipe list``: tables of the models and of the published training settings."""

from __future__ import annotations

import functools
import re
import textwrap

from megatron.config.config import Config
from megatron.config.errors import ConfigError, Violation
from megatron.config.model_files import SettingsFile, find_settings_file, get_launch_command, normalize_name, read_descriptions
from megatron.config.parsed_flags import LIST_NAME, parse_flags
from megatron.config.training import parse_batch_schedule
from megatron.config.yaml_file import read_yaml
from megatron.spec.counts import count_parameters
from megatron_lab.pages.flag_help import get_page_width

_COLUMN = "{:<14}  {:>5}  {:>6}  {:>6}"
_MIN_GAP = 4


def format_table(flag: str, word: str) -> str:
    """Return the text of the listing of a flag, `model` or `recipe`, reduced to the names that contain a word, if there is one.

    Raises:
        ConfigError: no name contains the word.
    """
    return format_model_table(word) if flag == "model" else format_recipe_table(word)


def format_model_table(word: str) -> str:
    """Return the text of ``--model list``: names, parameters, layers and hidden sizes in columns.

    Args:
        word: with a word, the text has only the models whose names or families contain it, with their shapes and sources.

    Raises:
        ConfigError: no name contains the word.
    """
    files = _sort_by_size(_select("model", word))
    return _format_columns(files) if not word else _format_details(files)


def _select(flag: str, word: str) -> list[SettingsFile]:
    """Return the files of a flag whose names or sources contain a word.

    Raises:
        ConfigError: no file contains the word. The message suggests similar names.
    """
    key, pattern = normalize_name(word), re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    files = [
        file
        for file in read_descriptions(flag).values()
        if any(key in normalize_name(text) for text in (file.name, *file.other_names)) or pattern.search(file.source)
    ]
    if not files:
        try:
            return [find_settings_file(flag, word)]
        except ConfigError as error:
            (problem,) = error.violations
            message = f"--{flag} {LIST_NAME} {word}: no {flag} has this in its name."
            raise ConfigError([Violation(problem.flags, message, problem.reason)]) from None
    return files


def _sort_by_size(files: list[SettingsFile]) -> list[SettingsFile]:
    """Return model files sorted by the first part of their names, such as `llama3`, and then by their numbers of parameters."""
    return sorted(files, key=lambda file: (file.name.partition("-")[0], _count(_read_config(file))))


@functools.cache
def _read_config(file: SettingsFile) -> Config:
    return parse_flags((), read_yaml(str(file.path))).build_config()


def _count(config: Config) -> int:
    return count_parameters(config.model, config.data.vocab_size or 0)


def _format_columns(files: list[SettingsFile]) -> str:
    """Format one line per model, in as many columns as the terminal has space for."""
    entries = []
    for file in files:
        config = _read_config(file)
        size = _format_size(_count(config)).replace(" ", "")
        entries.append(_COLUMN.format(file.name, size, config.model.num_layers, f"{config.model.hidden_size:,}"))
    header = _COLUMN.format("model", "size", "layers", "hidden")
    num_columns = max(1, (get_page_width() + _MIN_GAP) // (len(header) + _MIN_GAP))
    num_rows = -(-len(entries) // num_columns)
    columns = [entries[start : start + num_rows] for start in range(0, len(entries), num_rows)]
    rows = [(header,) * len(columns)]
    rows += [tuple(column[row] for column in columns if row < len(column)) for row in range(num_rows)]
    lines = [(" " * _MIN_GAP).join(row).rstrip() for row in rows]
    lines += ["", *_wrap("size: number of parameters. Names of the Hugging Face hub are accepted too.")]
    lines += _wrap(f"--model {LIST_NAME} llama: shapes and sources. --recipe {LIST_NAME}: training settings.")
    return "\n".join(lines) + "\n"


def _format_details(files: list[SettingsFile]) -> str:
    row_format = "{:<14} {:>7} {:>6} {:>7} {:>5} {:>8} {:>10}"
    rows = [row_format.format("model", "size", "layers", "hidden", "heads", "tokens", "vocabulary")]
    for file in files:
        config = _read_config(file)
        model, vocab_size = config.model, config.data.vocab_size
        shape = (model.num_layers, f"{model.hidden_size:,}", model.num_attention_heads, f"{model.seq_length:,}", f"{vocab_size:,}")
        rows.append(row_format.format(file.name, _format_size(_count(config)), *shape))
        script, *flags = get_launch_command(file.name) or [""]
        notes = [file.source]
        notes += [f"examples/{script}{' (with other flags)' if flags else ''}"] if script else []
        notes += [f"--recipe {name}" for name, recipe in read_descriptions("recipe").items() if recipe.model == file.name]
        rows += _wrap("; ".join(note.rstrip(".") for note in notes) + ".", "  ")
    rows += ["", *_wrap("Flags beside --model NAME override its settings. Launch scripts take MODEL=NAME.")]
    return "\n".join(row.rstrip() for row in rows) + "\n"


def format_recipe_table(word: str) -> str:
    """Return the text of ``--recipe list``: the published training settings and their sources.

    Args:
        word: with a word, the text has only the recipes whose names contain it, with what is not published and what differs.

    Raises:
        ConfigError: no name contains the word.
    """
    row_format = "{:<12} {:>7} {:>9} {:>8} {:<7} {}"
    rows = [row_format.format("recipe", "tokens", "batch", "lr", "decay", "source")]
    recipes = {file.model: file for file in _select("recipe", word)}
    for model in _sort_by_size([find_settings_file("model", name) for name in recipes]):
        file = recipes[model.name]
        config = _read_config(file)
        batch_steps = parse_batch_schedule(config.training.step_batch_size_schedule)
        batch_size = batch_steps[-1].batch_size if batch_steps else config.training.global_batch_size or 0
        optimizer = config.optimizer
        batch = _format_size(batch_size * config.model.seq_length)
        cells = (file.name, file.properties["Tokens"], batch, _format_rate(optimizer.lr or 0.0), optimizer.lr_decay_style)
        source = file.source if word else file.source.partition(" (")[2].partition(",")[0].partition(";")[0].rstrip(").")
        rows.append(row_format.format(*cells, "" if word else source))
        if word:
            rows += _wrap(source, "  ")
            for name in ("Not published", "Differs"):
                rows += _wrap(f"{name}: {file.properties[name]}", "  ") if name in file.properties else []
    rows += ["", *_wrap("tokens: of the run. batch: tokens of a step, at its largest. lr: maximum learning rate.")]
    further = "" if word else f" --recipe {LIST_NAME} gpt3 shows the full source and what is not published."
    rows += _wrap(f"--recipe NAME sets the model too.{further}")
    return "\n".join(row.rstrip() for row in rows) + "\n"


def _format_size(count: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= 0.9995 * size)
    return f"{count / size:.3g} {unit}"


def _format_rate(rate: float) -> str:
    mantissa, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, get_page_width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
