"""The coordinate check of Yang et al. 2022 (appendix D.1, figure 5): how much what a model computes changes in its first updates,
at several widths. Where learning rates hold at all widths, the change is the same at all of them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.config.config import Config
from megatron.model.gpt import GPTChunk
from megatron.model.inputs import ModelInputs
from megatron_lab.memory_plots.measure import prepare

Sizes = Mapping[str, Sequence[float]]
"""By the name of what is looked at: after each update, the root mean square of its change since the start."""


def at_width(config: Config, width: int, mup_base_width: int | None) -> Config:
    """The settings at another width. The MLP's width and the number of heads grow with it; heads stay as large as they are.

    Raises:
        ValueError: the width is not a whole number of heads, or of heads that share a key.
    """
    model = config.model
    heads, rest = divmod(width * model.num_attention_heads, model.hidden_size)
    groups, rest_of_groups = divmod(width * model.num_key_value_heads, model.hidden_size)
    if rest or (model.group_query_attention and rest_of_groups):
        raise ValueError(
            f"--widths {width}: the number of heads grows with the width, and {model.num_attention_heads} heads "
            f"({model.num_key_value_heads} of keys) at --hidden-size {model.hidden_size} make no whole number there."
        )
    changed = dataclasses.replace(
        model,
        hidden_size=width,
        num_attention_heads=heads,
        num_query_groups=groups if model.group_query_attention else model.num_query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=round(model.ffn_size * width / model.hidden_size),
        mup_base_width=mup_base_width,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return dataclasses.replace(config, model=changed)


def changes(config: Config, updates: int, seeds: int) -> dict[str, list[float]]:
    """Train from several seeds, each time on one batch again and again; returns the mean of their `Sizes`."""
    found = []
    for seed in range(config.training.seed, config.training.seed + seeds):
        training = dataclasses.replace(config.training, seed=seed)
        found.append(_changes(dataclasses.replace(config, training=training), updates))
    return {name: [statistics.fmean(each) for each in zip(*(one[name] for one in found), strict=True)] for name in found[0]}


def _changes(config: Config, updates: int) -> dict[str, list[float]]:
    rate = config.optimizer.lr
    assert rate is not None, "required"
    step, batch = prepare(config)
    (chunk,) = step.model.chunks.values()
    before = _seen(chunk, batch[0])
    found: dict[str, list[float]] = {name: [] for name in before}
    for number in range(1, updates + 1):
        step.run(batch, iteration=number, learning_rate=rate, weight_decay=config.optimizer.weight_decay)
        for name, values in _seen(chunk, batch[0]).items():
            found[name].append((values - before[name]).square().mean().sqrt().item())
    return found


@torch.no_grad()
def _seen(chunk: GPTChunk, inputs: ModelInputs) -> dict[str, Tensor]:
    """What the parts of the last layer, and those around the layers, give."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, given, values: found.update({name: values.double()})

    block = chunk.blocks[-1]
    assert chunk.embedding is not None, "a model in one chunk"
    modules = {
        "embedding": chunk.embedding,
        "attention of the last layer": block.attention.output,
        "MLP of the last layer": block.mlp,
    }
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    hidden = chunk.hidden_states(inputs)
    found |= {"last layer": hidden.double(), "logits": chunk.logits(hidden).double()}
    for hook in hooks:
        hook.remove()
    return found


def growth(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Slope of log size over log width by least squares: 0 where the width does not matter, 1 where it grows in proportion."""
    x, y = [math.log(width) for width in widths], [math.log(size) for size in sizes]
    mean = statistics.fmean(x)
    return sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x)
