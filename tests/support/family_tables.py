"""The tables of Hugging Face families in docs/models.md, made from the code and the published configurations.

``python -m tests.support.family_tables`` rewrites them. Each stands between two marks: <!-- NAME: begin --> and <!-- NAME: end -->.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.config.cli import parse
from megatron.config.flags import get_flag
from megatron.config.model import CHANGEABLE_FIELDS, ModelConfig
from megatron_lab.foreign.huggingface.families import CONVERTIBLE, FAMILIES
from tests.support.cli import ROOT
from tests.support.family_features import FEATURES, find_presence
from tests.support.published_configs import published, read_config

PAGE = ROOT / "docs/models.md"
LLAMA_FLAGS = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "group_query_attention"),
    *("num_query_groups", "seq_length", "max_position_embeddings"),
)
"""Settings that the table of flags leaves out."""


@functools.cache
def published_models() -> dict[str, dict[str, ModelConfig]]:
    """The published models of each family that can be converted, by their names."""
    models: dict[str, dict[str, ModelConfig]] = {family: {} for family in CONVERTIBLE}
    for name, (config, _) in published().items():
        models[config["model_type"]][name] = read_config(config)[0]
    return models


def base_flags(model: ModelConfig) -> str:
    """The flags to which those of the table are added."""
    return LLAMA_FLAGS if model.position_embedding_type == "rope" else ""


def own_settings(model: ModelConfig) -> dict[str, Any]:
    """The settings of a model that its base flags do not give it, but for sizes and for those that only training knows."""
    base = parse([*base_flags(model).split(), *"--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 32".split()])
    left_out = {*SIZES, *CHANGEABLE_FIELDS}
    return {name: value for name, value in vars(model).items() if value != getattr(base.model, name) and name not in left_out}


def spell(name: str, value: Any) -> str:
    """A setting as a flag. A list of layers is spelled with repetitions."""
    flag = get_flag(name).name
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, str) and value.startswith("["):
        groups = ((layer, len([*same])) for layer, same in itertools.groupby(value.strip("[]").split(",")))
        return f"--{flag} {'+'.join(f'[{layer}]*{count}' for layer, count in groups)}"
    items = value if isinstance(value, tuple) else (value,)
    words = (str(int(item)) if isinstance(item, float) and item.is_integer() else str(item) for item in items)
    return " ".join([f"--{flag}", *words])


def flags_table() -> list[str]:
    """A row for each family: its published models, the flags of the first, and those that differ in others."""
    head = ("`--family`", "class of transformers", "published models", "flags of the first", "flags that differ in another")
    rows = [head, ("---",) * len(head)]
    for family, models in published_models().items():
        first, *others = models.values()
        flags = " ".join(spell(name, value) for name, value in own_settings(first).items())
        own = set().union(*(own_settings(model) for model in models.values()))
        differ = [
            name for name in vars(first) if name in own and any(getattr(other, name) != getattr(first, name) for other in others)
        ]
        rows.append(
            (
                f"`{family}`",
                f"`{FAMILIES[family].architecture}`",
                f"{len(models)}: {', '.join(models)}",
                (f"`{flags}`" if flags else "") if base_flags(first) else "(no flags; not the Llama flags)",
                ", ".join(f"`--{get_flag(name).name}`" for name in differ),
            )
        )
    return in_markdown(rows)


def in_markdown(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |".replace("|  ", "| ").replace("|  ", "| ") for row in rows]


def features_table() -> list[str]:
    """A row for each feature, and a column for each family."""
    rows = [("feature", "flags", *CONVERTIBLE), ("---",) * (2 + len(CONVERTIBLE))]
    rows += [(one.title, one.spell(), *(find_presence(one, family) for family in CONVERTIBLE)) for one in FEATURES]
    return in_markdown(rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "flags of each family": flags_table,
    "features of each family": features_table,
}
"""What makes each table, by the name in its marks."""


def rewrite(page: str) -> str:
    """The text of the page with the tables of the code.

    Raises:
        ValueError: the page lacks a mark.
    """
    for name, table in TABLES.items():
        begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE} lacks {begin} or {end} after it")
        page = "\n".join([f"{before}{begin}", "", *table(), "", f"{end}{after}"])
    return page


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
