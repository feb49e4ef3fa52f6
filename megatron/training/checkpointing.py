"""What of a run goes into a checkpoint, and how it comes back.

Weights are stored once, in their most exact form: the float32 mains where the model computes in 16 bits, else the parameters
themselves. So a checkpoint does not depend on the model's dtype, and the 16-bit parameters are the mains rounded, as they were in
the run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.global_tensor import GlobalTensor
from megatron.checkpoint.loading.load import find_checkpoint, load_tensors, read_config, read_state
from megatron.checkpoint.saving.check import check_writable
from megatron.checkpoint.saving.retention import retain
from megatron.checkpoint.saving.save import save_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.config import Config
from megatron.config.optimizer import OptimizerConfig
from megatron.config.save import from_dict
from megatron.optimizer.grad_scaler import GradScaler
from megatron.optimizer.lr_schedule import ScheduleLengths
from megatron.optimizer.optimizer import ShardedOptimizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard
from megatron.training.progress import Progress
from megatron.training.together import together

WEIGHT = "model"

# Model settings that may differ between a checkpoint and the run that continues it.
_FREE_MODEL_FIELDS = {
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "make_vocab_size_divisible_by",
    "fp32_residual_connection",
    "init_method_std",
}
# Settings that decide which tokens a step holds: a resumed run may change them, but should know.
_ORDER_FIELDS = {
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "split",
    "data_order",
    "mock_data",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "seed",
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
}
_SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


def global_tensors(
    optimizer: ShardedOptimizer, context: ParallelContext, *, weights: bool = True, state: bool = True
) -> list[GlobalTensor]:
    """This rank's shards as parts of global tensors: `model.<name>`, and the moments such as `exp_avg.<name>`."""
    found = []
    for shard in optimizer.shards:
        parts = {WEIGHT: shard.main} if weights else {}
        if state:
            parts |= optimizer.moments(shard)
        found += [_global(kind, shard, tensor, context) for kind, tensor in parts.items()]
    return found


def _global(kind: str, shard: Shard, tensor: Any, context: ParallelContext) -> GlobalTensor:
    return GlobalTensor(f"{kind}.{shard.record.name}", shard.record.shape, tensor, shard.boxes(context))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedules of learning rate and weight decay: settings, and lengths in samples."""

    optimizer: OptimizerConfig
    lengths: ScheduleLengths

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        fields = {name: getattr(self.optimizer, name) for name in _SCHEDULE_FIELDS}
        return {**fields, "lengths": dataclasses.asdict(self.lengths)}

    def with_saved(self, saved: dict[str, Any]) -> Schedule:
        """The schedule that a checkpoint was trained with."""
        fields = {name: saved[name] for name in _SCHEDULE_FIELDS}
        return Schedule(dataclasses.replace(self.optimizer, **fields), ScheduleLengths(**saved["lengths"]))


class Saver:
    """Saves a run's state; checks first that it can.

    Args:
        run_record: the resolved settings, versions and command line, kept in each checkpoint, and in the save folder as run.json
            already at the start.
    """

    def __init__(self, config: CheckpointConfig, context: ParallelContext, run_record: dict[str, Any], vocab_size: int) -> None:
        self._config, self._context = config, context
        self._record = {**run_record, "vocab_size": vocab_size}
        self._last: int | None = None
        if config.save is not None:
            folder = Path(config.save)
            together(context, lambda: self._prepare(folder) if context.rank == 0 else None)

    def _prepare(self, folder: Path) -> None:
        check_writable(folder)
        (folder / "run.json").write_text(json.dumps(self._record, indent=2) + "\n", encoding="utf-8")

    def save(self, progress: Progress, optimizer: ShardedOptimizer, scaler: GradScaler, schedule: Schedule) -> Path | None:
        """Write a checkpoint of this iteration, unless there is no --save or it is written already. All ranks call it together."""
        if self._config.save is None or self._last == progress.iteration:
            return None
        folder = Path(self._config.save)
        state = {
            "progress": progress.to_json(),
            "optimizer_updates": optimizer.num_updates,
            "scaler": scaler.state_dict(),
            "schedule": schedule.to_json(),
            "has_optimizer": self._config.save_optim,
        }
        tensors = global_tensors(optimizer, self._context, state=self._config.save_optim)
        path = save_checkpoint(folder, progress.iteration, tensors, self._record, state)
        self._last = progress.iteration
        if self._context.rank == 0:
            retain(folder, self._config.keep_last, self._config.save_retain_interval)
        return path


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    progress: Progress
    schedule: Schedule
    path: Path | None
    """The checkpoint; None when the run begins, be it with the weights of another."""
    notes: tuple[str, ...] = ()


def resume(
    config: Config, context: ParallelContext, optimizer: ShardedOptimizer, scaler: GradScaler, schedule: Schedule, vocab_size: int
) -> Resumed:
    """Fill weights and state from the checkpoint that --load names, if there is one. All ranks call it together.

    Raises:
        ValueError: there is none and there must be, it belongs to another model, is damaged, or its schedules differ.
    """
    asked = config.checkpoint
    if asked.load is None:
        return Resumed(Progress(), schedule, None)
    # One rank looks and tells the others: thousands need not ask the file system, and all take the same one.
    found = broadcast_object(together(context, lambda: _look(config, vocab_size) if context.rank == 0 else None), context.world)
    if found is None:
        return Resumed(Progress(), schedule, None, (f"--load {asked.load} holds no checkpoint: the run begins at iteration 0",))
    path, state, notes = found
    wants_state = asked.load_optim and not asked.finetune
    if wants_state and not state["has_optimizer"]:
        raise CheckpointError(
            f"{path} was saved without optimizer state: add --no-load-optim, or --finetune to start counting from 0"
        )
    tensors = global_tensors(optimizer, context, state=wants_state)
    load_tensors(path, tensors, allow_unused=lambda name: not wants_state and not name.startswith(f"{WEIGHT}."))
    optimizer.publish()
    if asked.finetune:
        return Resumed(Progress(), schedule, None, (*notes, f"weights of {path}; counting starts from iteration 0 (--finetune)"))
    if wants_state:
        optimizer.set_num_updates(int(state["optimizer_updates"]))
        scaler.load_state_dict(state["scaler"])
    else:
        notes.append("moments start from zero (--no-load-optim)")
    progress = Progress.from_json(state["progress"])
    return Resumed(progress, _agreed_schedule(schedule, state["schedule"], path), path, tuple(notes))


def _look(config: Config, vocab_size: int) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Folder and state of the checkpoint to take, and notes; checks that it fits."""
    folder = config.checkpoint.load
    notes: list[str] = []
    assert folder is not None
    path = find_checkpoint(Path(folder), config.checkpoint.ckpt_step, tell=notes.append)
    if path is None:
        if config.checkpoint.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {folder} holds no checkpoint, and --exit-on-missing-checkpoint is given")
        return None
    return path, read_state(path), notes + _check_model(config, read_config(path), vocab_size, path)


def _check_model(config: Config, record: dict[str, Any], vocab_size: int, path: Path) -> list[str]:
    """Notes on settings that differ and may.

    Raises:
        CheckpointError: settings that make another model differ.
    """
    saved = from_dict(record["config"])
    differing = _differences(saved.model, config.model)
    wrong = [text for name, text in differing.items() if name not in _FREE_MODEL_FIELDS]
    if record["vocab_size"] != vocab_size:
        wrong.append(f"vocabulary {record['vocab_size']} there, {vocab_size} here (see --tokenizer-type and its files)")
    if wrong:
        raise CheckpointError(
            f"{path} holds another model:\n  "
            + "\n  ".join(wrong)
            + "\n  Use the checkpoint's settings (--use-checkpoint-args takes them), or another --load folder."
        )
    before, now = saved.optimizer.optimizer, config.optimizer.optimizer
    if before != now and config.checkpoint.load_optim and not config.checkpoint.finetune:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {before}, not of {now}: take {before}, or leave its state with --no-load-optim"
        )
    free = [text for name, text in differing.items() if name in _FREE_MODEL_FIELDS]
    order = _differences(saved.data, config.data) | _differences(saved.training, config.training)
    free += [text for name, text in order.items() if name in _ORDER_FIELDS]
    return [f"differs from the checkpoint: {text}" for text in free]


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
    """A setting after its default: left out and given as its default are the same."""
    if name == "max_position_embeddings" and part.position_embedding_type != "learned_absolute":
        return None
    if name == "group_query_attention":
        return None  # what counts is the number of key-value heads
    return getattr(part, _EFFECTIVE.get(name, name))


def _agreed_schedule(here: Schedule, saved: dict[str, Any], path: Path) -> Schedule:
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
