"""Rewrite a checkpoint, including moments, with the files that the ranks of another layout would have written.

Training never needs this, because a run of any layout can load any checkpoint. It is for sites where each rank should read only one
file, or that archive the files of a layout. The tensors and the content digest do not change. Peak memory: one slice (of one tensor
on one rank).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from megatron_lab.checkpoints.text import parse_step

if TYPE_CHECKING:
    from megatron.config.config import Config
    from megatron_lab.foreign.source import StoredCheckpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `reshard` to its parser."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, or one checkpoint in it")
    parser.add_argument("output", metavar="OUTPUT", help="the --save folder to write to; it must not hold this iteration yet")
    parser.add_argument(
        "--step",
        type=parse_step,
        metavar="N|best",
        help="the iteration to take, instead of the newest, or best: the lowest validation loss (--keep-best)",
    )

    def add(*names: str, **options: Any) -> None:
        parser.add_argument(*names, **options)

    add("--tensor-model-parallel-size", "--tp", type=int, default=1, metavar="N", help="tensor ranks (1)")
    add("--pipeline-model-parallel-size", "--pp", type=int, default=1, metavar="N", help="pipeline stages (1)")
    add("--expert-model-parallel-size", "--ep", type=int, metavar="N", help="ranks with different experts (1)")
    add("--expert-tensor-parallel-size", "--etp", type=int, metavar="N", help="ranks that split each expert (as many as TP)")
    add("--num-virtual-stages-per-pipeline-rank", type=int, metavar="N", help="chunks of layers on each stage")
    add("--num-layers-per-virtual-pipeline-stage", type=int, metavar="N", help="the same, by the size of the chunks")
    add("--pipeline-schedule", metavar="NAME", help="the schedule, which places the chunks (as in pretrain_gpt.py)")
    add("--pipeline-model-parallel-layout", metavar="LAYOUT", help="the layers of every chunk, such as 'E|(t|)*3,m|m||L'")
    add("--decoder-first-pipeline-num-layers", type=int, metavar="N", help="layers of the first stage")
    add("--decoder-last-pipeline-num-layers", type=int, metavar="N", help="layers of the last stage")
    add("--max-file-bytes", type=int, metavar="N", help="begin another file where one would become larger")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `reshard`: write the checkpoint and print a summary. Returns the exit status."""
    from megatron.checkpoint.errors import CheckpointError
    from megatron.checkpoint.save_folder import get_checkpoint_name, parse_iteration
    from megatron.checkpoint.storage_url import open_storage
    from megatron_lab.checkpoints.layout_files import plan_layout_files
    from megatron_lab.checkpoints.stream import write_checkpoint
    from megatron_lab.foreign.open_source import open_source
    from megatron_lab.foreign.source import StoredCheckpoint

    source = open_source(args.source, args.step)
    if not isinstance(source, StoredCheckpoint):
        raise CheckpointError(
            f"{args.source} is not a checkpoint of this program. Convert it with the import command of tools/checkpoint.py first"
        )
    for note in source.notes:
        print(f"note: {note}", file=sys.stderr)
    iteration = parse_iteration(source.name)
    if iteration is None:
        raise CheckpointError(
            f"{source.name}: the name of the folder must be iter_ followed by the iteration, such as iter_0000100. Rename the "
            "folder"
        )
    output = open_storage(args.output)
    if output.list_names(get_checkpoint_name(iteration)):
        raise CheckpointError(f"{output.get_location(get_checkpoint_name(iteration))} exists already: set another OUTPUT")
    config = apply_layout(source.settings, args)
    rank_slices = plan_layout_files(config.model, config.parallel, source.vocab_size, source.tensors)
    _check_complete(source, rank_slices)
    record = {**source.config, "config": {**source.config["config"], "parallel": dataclasses.asdict(config.parallel)}}
    path = write_checkpoint(
        args.output,
        iteration,
        source.tensors,
        source.read_stored,
        record,
        source.state,
        rank_slices=rank_slices,
        max_file_bytes=args.max_file_bytes,
        content_digest=source.manifest.content_digest,
    )
    old_digest, new_digest = source.manifest.content_digest, StoredCheckpoint(path).manifest.content_digest
    print(
        f"wrote {path}: files of {len(rank_slices)} ranks, content digest {new_digest}"
        + (", as before" if old_digest == new_digest else "")
    )
    return 0


def apply_layout(saved: Config, args: argparse.Namespace) -> Config:
    """Return the settings of the saved run, with the parallel layout replaced by that of the command line.

    Raises:
        ConfigError: the model does not fit this layout. The message says which layouts fit.
    """
    from megatron.config.errors import ConfigError
    from megatron.config.flags import get_flags
    from megatron.config.parallel import ParallelConfig
    from megatron.config.rules import find_violations
    from megatron_lab.checkpoints.layout_files import build_replica_topology

    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    values = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    flags_by_field = {flag.field: flag for flag in get_flags().values() if flag.topic == "parallel"}
    for name, value in values.items():
        try:
            values[name] = flags_by_field[name].from_json(value)
        except ValueError as error:
            raise ValueError(f"--{flags_by_field[name].name} {value}: {error}") from error
    parallel = ParallelConfig(**values)
    if saved.model.num_experts is not None and parallel.tensor_model_parallel_size > 1:
        parallel = dataclasses.replace(
            parallel, sequence_parallel=True
        )  # required by the rules; it does not change the stored tensors
    config = dataclasses.replace(saved, parallel=parallel)
    dense_sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    expert_sizes = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    world_size = build_replica_topology(parallel).world_size if min(*dense_sizes, *expert_sizes) > 0 else 0
    requested_flags = {f"--{name.replace('_', '-')}" for name in values}
    # Only rules about the requested flags matter for the files.
    violations = [
        violation
        for violation in find_violations(config, world_size)
        if requested_flags.intersection(violation.flags) or world_size < 1
    ]
    if violations:
        raise ConfigError(violations)
    return config


def _check_complete(source: StoredCheckpoint, rank_slices: list[list[tuple[str, Any]]]) -> None:
    """Check that some rank of the new layout writes each stored tensor. A tensor that no rank writes would be lost.

    Args:
        rank_slices: for each rank, pairs of the full name of a tensor and a slice of it.
    """
    from megatron.checkpoint.errors import CheckpointError, format_list

    assigned_names = {name for slices in rank_slices for name, _ in slices}
    if missing := [name for name in source.tensors if name not in assigned_names and 0 not in source.tensors[name].shape]:
        raise CheckpointError(
            f"{source.name} holds tensors that the model in its settings does not have, so the new checkpoint would lack them: "
            f"{format_list(missing)}. The checkpoint was altered, or another version of the program wrote it: use that version"
        )
