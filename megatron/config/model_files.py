"""Models by name: `--model llama3-8b` reads the settings in models/llama3-8b.yaml, below all that is given beside it."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.config.errors import ConfigError, Violation
from megatron.config.extras import optional
from megatron.config.flags import nearest_names
from megatron.config.given import sort_given

FOLDER = Path(__file__).resolve().with_name("models")
LIST = "list"
"""The name that asks for the table of all."""

_LAUNCH = re.compile(r"^# Launch script: (.+)$", re.MULTILINE)
"""How a file says which launch script fits its model, with flags behind it if some have to change."""


def names() -> list[str]:
    """All models that have a name."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def file_of(name: str) -> str:
    """The file with a model's settings.

    Raises:
        ConfigError: there is none.
    """
    path = FOLDER / f"{name}.yaml"
    if name in names():
        return str(path)
    near = nearest_names(name, names())
    meant = f"Perhaps you meant {' or '.join(near)}. " if near else ""
    rule = f"{meant}--model list shows all; --config FILE reads any file."
    raise ConfigError([Violation(("--model",), f"--model {name}: there is no model of this name.", rule)])


def launch_words(name: str) -> list[str]:
    """The launch script that fits a model, and the flags behind it; with MODEL=name it trains the model on GPUs of 80 GB."""
    found = _LAUNCH.search(Path(file_of(name)).read_text(encoding="utf-8"))
    return found[1].split() if found is not None else []


def table() -> str:
    """All models with their sizes and the launch scripts that fit them."""
    # Here, because whoever names one model does not need the specs.
    from megatron.spec.counts import count_parameters

    optional("yaml", "--model needs PyYAML")
    from megatron.config.yaml_file import read_yaml

    configs = {name: sort_given((), read_yaml(file_of(name))).config() for name in names()}
    sizes = {name: count_parameters(config.model, config.data.vocab_size or 0) for name, config in configs.items()}
    widths = "{:<14} {:>10} {:>7} {:>7} {:>6} {:>8} {:>11}  {}"
    lines = [widths.format("model", "parameters", "layers", "hidden", "heads", "tokens", "vocabulary", "launch script")]
    for name in sorted(sizes, key=lambda name: sizes[name]):
        model, vocabulary = configs[name].model, configs[name].data.vocab_size
        shape = (model.num_layers, f"{model.hidden_size:,}", model.num_attention_heads, f"{model.seq_length:,}", f"{vocabulary:,}")
        script, *changes = launch_words(name) or ["-"]
        lines.append(widths.format(name, _in_words(sizes[name]), *shape, script + (" (with other flags)" if changes else "")))
    lines += [
        "",
        "tokens: of a training sequence. Flags beside --model NAME count instead of the model's. Launch scripts take MODEL=NAME.",
    ]
    return "\n".join(lines) + "\n"


def _in_words(number: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if number >= 0.9995 * size)
    return f"{number / size:.3g} {unit}"
