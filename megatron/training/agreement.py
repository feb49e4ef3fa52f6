"""How a run's settings compare with those of the checkpoint that it begins with: what is refused, and what is told."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import Place
from megatron.config.config import Config
from megatron.config.model import FREE_AT_BEGINNING, FREE_FIELDS, ModelConfig
from megatron.config.save import from_dict
from megatron.training.checkpointing import Schedule

# What changes the numbers of a run that goes on: it may, but the user should know. Of the other topics it is all settings.
_TOLD = ("data", "training", "optimizer", "precision", "parallel")
# These say where and how long, not what; or another check speaks of them.
_NOT_TOLD = {
    "num_workers",
    "data_cache_path",
    "exit_interval",
    "exit_duration_in_mins",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
    "distributed_timeout_minutes",
    "device",
}


def check_model(config: Config, record: dict[str, Any], vocab_size: int, path: Place, *, goes_on: bool) -> list[str]:
    """Compare the settings.

    Args:
        config: of this run.
        record: `config.json` of the checkpoint.
        vocab_size: of this run's tokenizer.
        path: the checkpoint.
        goes_on: whether the run goes on where the checkpoint stands; else it takes the weights alone, and only the model counts.

    Returns:
        A note for each setting that differs and may.

    Raises:
        CheckpointError: settings that make another model differ, or the optimizer is another one and its state is wanted.
    """
    saved = from_dict(record["config"])
    model = _differences(saved.model, config.model)
    may_differ = FREE_FIELDS if goes_on else FREE_FIELDS | FREE_AT_BEGINNING
    wrong = [text for name, text in model.items() if name not in may_differ]
    if record["vocab_size"] != vocab_size:
        wrong.append(f"vocabulary {record['vocab_size']} there, {vocab_size} here (see --tokenizer-type and its files)")
    if wrong:
        raise CheckpointError(
            f"{path} holds another model:\n  "
            + "\n  ".join(wrong)
            + "\n  Use the checkpoint's settings (--use-checkpoint-args takes them), or another checkpoint."
        )
    before, now = saved.optimizer.optimizer, config.optimizer.optimizer
    if goes_on and before != now and config.checkpoint.load_optim:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {before}, not of {now}: take {before}, or leave its state with --no-load-optim"
        )
    free = list(model.values())
    for topic in _TOLD if goes_on else ():
        differing = _differences(getattr(saved, topic), getattr(config, topic))
        free += [text for name, text in differing.items() if name not in _NOT_TOLD]
    return [f"differs from the checkpoint: {text}" for text in free]


def agreed_schedule(here: Schedule, saved: dict[str, Any], path: Place) -> Schedule:
    """The schedule to go on with.

    Raises:
        CheckpointError: the two differ and no flag says which one counts.
    """
    if here.optimizer.use_checkpoint_opt_param_scheduler:
        return here.with_saved(saved)
    mine = here.to_json()
    if here.optimizer.override_opt_param_scheduler or mine == saved:
        return here
    flat_mine, flat_saved = ({**d, **d["lengths"]} for d in (mine, saved))
    idle = {"lengths"}  # the run may be longer or shorter where no schedule follows its length
    if here.optimizer.weight_decay_incr_style == "constant":
        idle.add("total_samples")
    if here.optimizer.lr_decay_style == "constant":
        idle.add("decay_samples")
    differing = [
        f"{name}: {flat_saved[name]} there, {flat_mine[name]} here"
        for name in flat_mine
        if name not in idle and flat_mine[name] != flat_saved[name]
    ]
    if not differing:
        return here
    raise CheckpointError(
        f"the schedules of learning rate or weight decay differ from those of {path}:\n  "
        + "\n  ".join(differing)
        + "\n  Add --override-opt-param-scheduler to take these, or --use-checkpoint-opt-param-scheduler to take the checkpoint's."
    )


def _differences(saved: Any, here: Any) -> dict[str, str]:
    """Fields with another value, each as a text."""
    values = {field.name: (_effective(saved, field.name), _effective(here, field.name)) for field in dataclasses.fields(saved)}
    return {
        name: f"--{name.replace('_', '-')} {there} there, {this} here" for name, (there, this) in values.items() if there != this
    }


_EFFECTIVE = {
    "ffn_hidden_size": "ffn_size",
    "kv_channels": "head_size",
    "num_query_groups": "num_key_value_heads",
    "max_position_embeddings": "num_positions",
}


def _effective(part: Any, name: str) -> Any:
    """A setting after its default: left out and given as its default are the same. None where it has no effect."""
    if not isinstance(part, ModelConfig):
        return getattr(part, name)
    if name == "max_position_embeddings" and part.position_embedding_type != "learned_absolute":
        return None
    if name == "group_query_attention":
        return None  # what counts is the number of key-value heads
    return getattr(part, _EFFECTIVE.get(name, name))
