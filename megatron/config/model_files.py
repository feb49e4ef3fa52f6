"""Models by name: `--model llama3-8b` reads the settings in models/llama3-8b.yaml. All other settings of the command line override
them."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.errors import ConfigError, Violation
from megatron.config.flags import suggest_names
from megatron.config.optional_packages import import_optional
from megatron.config.parsed_flags import parse_flags

FOLDER = Path(__file__).resolve().with_name("models")
LIST_NAME = "list"
"""Value of --model that prints the table of all models."""

_LAUNCH = re.compile(r"^# Launch script: (.+)$", re.MULTILINE)
"""Comment of a model file that names the launch script for the model, with flags if some have to change."""


def list_models() -> list[str]:
    """Return the names of all models that --model accepts, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def get_model_file(name: str) -> str:
    """Return the path of the YAML file with a model's settings.

    Raises:
        ConfigError: there is no model of this name.
    """
    path = FOLDER / f"{name}.yaml"
    if name in list_models():
        return str(path)
    similar = suggest_names(name, list_models())
    hint = f"Perhaps you meant {' or '.join(similar)}. " if similar else ""
    reason = f"{hint}--model list shows all; --config FILE reads any file."
    raise ConfigError([Violation(("--model",), f"--model {name}: there is no model of this name.", reason)])


def get_launch_command(name: str) -> list[str]:
    """Return the launch script of a model and the flags that it needs, as words; empty if the model has no script. Run with
    MODEL=name in the environment, the script trains the model on GPUs of 80 GB."""
    match = _LAUNCH.search(Path(get_model_file(name)).read_text(encoding="utf-8"))
    return match[1].split() if match is not None else []


def format_model_table() -> str:
    """Return the text of `--model list`: a table of all models with their sizes and launch scripts, the smallest model first."""
    # Imported here, because a run of one model does not need it.
    from megatron.spec.counts import count_parameters

    import_optional("yaml", "--model needs PyYAML")
    from megatron.config.yaml_file import read_yaml

    configs = {name: parse_flags((), read_yaml(get_model_file(name))).build_config() for name in list_models()}
    sizes = {name: count_parameters(config.model, config.data.vocab_size or 0) for name, config in configs.items()}
    row_format = "{:<14} {:>10} {:>7} {:>7} {:>6} {:>8} {:>11}  {}"
    rows = [row_format.format("model", "parameters", "layers", "hidden", "heads", "tokens", "vocabulary", "launch script")]
    for name in sorted(sizes, key=lambda name: sizes[name]):
        model, vocab_size = configs[name].model, configs[name].data.vocab_size
        shape = (model.num_layers, f"{model.hidden_size:,}", model.num_attention_heads, f"{model.seq_length:,}", f"{vocab_size:,}")
        script, *changes = get_launch_command(name) or ["-"]
        rows.append(row_format.format(name, _format_size(sizes[name]), *shape, script + (" (with other flags)" if changes else "")))
    rows += [
        "",
        "tokens: of a training sequence. Flags beside --model NAME override the model's settings. Launch scripts take MODEL=NAME.",
    ]
    return "\n".join(rows) + "\n"


def _format_size(count: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= 0.9995 * size)
    return f"{count / size:.3g} {unit}"
