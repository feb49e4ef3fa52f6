"""Coordinate check of Yang et al. 2022 (appendix D.1, figure 5): measure how much activations change in the first updates, at
several hidden sizes.

If a learning rate transfers between hidden sizes, as with muP, activations change equally at all hidden sizes.
"""

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
from megatron_lab.memory_plots.measure import prepare_step

ChangeSizes = Mapping[str, Sequence[float]]
"""By the name of an activation: root mean square of its change since initialization, after each update."""


def scale_to_width(config: Config, width: int, mup_base_width: int | None) -> Config:
    """Return the settings with another hidden size.

    The MLP width and the number of heads grow in proportion to the hidden size. The head size stays, and dropout is switched off.

    Args:
        width: the new hidden size.
        mup_base_width: value of --mup-base-width for the new settings; None for a model without muP.

    Raises:
        ValueError: the number of heads or of query groups would not be an integer.
    """
    model = config.model
    num_heads, head_remainder = divmod(width * model.num_attention_heads, model.hidden_size)
    num_groups, group_remainder = divmod(width * model.num_key_value_heads, model.hidden_size)
    if head_remainder or (model.group_query_attention and group_remainder):
        raise ValueError(
            f"--widths {width}: the number of heads grows with the width, and {model.num_attention_heads} heads "
            f"({model.num_key_value_heads} key-value heads) at --hidden-size {model.hidden_size} give no integer at this width. "
            "Choose a width that gives whole numbers of heads."
        )
    model_config = dataclasses.replace(
        model,
        hidden_size=width,
        num_attention_heads=num_heads,
        num_query_groups=num_groups if model.group_query_attention else model.num_query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=round(model.ffn_size * width / model.hidden_size),
        mup_base_width=mup_base_width,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return dataclasses.replace(config, model=model_config)


def measure_changes(config: Config, num_updates: int, num_seeds: int) -> dict[str, list[float]]:
    """Train the model from several seeds, and measure how much its activations change. All updates with a seed use the same batch.

    Args:
        num_updates: number of optimizer updates per seed.
        num_seeds: number of seeds: --seed, --seed + 1, ...

    Returns:
        By the name of an activation, and for each update: root mean square of the activation's change since initialization. The
            values are means over the seeds.
    """
    changes_per_seed = []
    for seed in range(config.training.seed, config.training.seed + num_seeds):
        training = dataclasses.replace(config.training, seed=seed)
        changes_per_seed.append(_measure_changes_from_seed(dataclasses.replace(config, training=training), num_updates))
    return {
        name: [statistics.fmean(values) for values in zip(*(changes[name] for changes in changes_per_seed), strict=True)]
        for name in changes_per_seed[0]
    }


def _measure_changes_from_seed(config: Config, num_updates: int) -> dict[str, list[float]]:
    learning_rate = config.optimizer.lr
    assert learning_rate is not None, "required"
    step, batch = prepare_step(config)
    (chunk,) = step.model.chunks.values()
    initial_outputs = _record_outputs(chunk, batch[0])
    changes: dict[str, list[float]] = {name: [] for name in initial_outputs}
    for iteration in range(1, num_updates + 1):
        step.run(batch, iteration=iteration, learning_rate=learning_rate, weight_decay=config.optimizer.weight_decay)
        for name, values in _record_outputs(chunk, batch[0]).items():
            changes[name].append((values - initial_outputs[name]).square().mean().sqrt().item())
    return changes


@torch.no_grad()
def _record_outputs(chunk: GPTChunk, inputs: ModelInputs) -> dict[str, Tensor]:
    """Run the model on a microbatch. Return some activations in float64, by name.

    They are the outputs of the embedding, of attention and MLP in the last layer, and of the last layer, and the logits.
    """
    outputs: dict[str, Tensor] = {}

    def build_hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda module, args, output: outputs.update({name: output.double()})

    block = chunk.blocks[-1]
    assert chunk.embedding is not None, "the check needs a model in one chunk"
    modules = {
        "embedding": chunk.embedding,
        "attention of the last layer": block.attention.output,
        "MLP of the last layer": block.mlp,
    }
    hooks = [module.register_forward_hook(build_hook(name)) for name, module in modules.items()]
    hidden = chunk.compute_hidden_states(inputs)
    outputs |= {"last layer": hidden.double(), "logits": chunk.compute_logits(hidden).double()}
    for hook in hooks:
        hook.remove()
    return outputs


def fit_growth_exponent(widths: Sequence[int], changes: Sequence[float]) -> float:
    """Return the exponent a of the power law change = c * width^a, by a least-squares fit of log change against log width.

    The exponent is 0 if the change does not depend on the width, and 1 if it is proportional to the width.

    Args:
        widths: hidden sizes.
        changes: size of the change of an activation at each width.
    """
    x, y = [math.log(width) for width in widths], [math.log(change) for change in changes]
    x_mean = statistics.fmean(x)
    return sum((a - x_mean) * b for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)
