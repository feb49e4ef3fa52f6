"""Write a checkpoint anew, in files cut as the ranks of a layout hold them, moments included.

No run needs this: every run reads every checkpoint. It is for sites that want each rank to read one file of its own, or to store
the files of a layout. The content stays the same, and so does its digest. Peak memory: one box (what one rank holds of one tensor).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.config.config import Config
    from megatron_lab.foreign.source import StoredCheckpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a --save folder, or one checkpoint in it")
    parser.add_argument("output", metavar="OUTPUT", help="the --save folder to write to; it must not hold this iteration yet")
    parser.add_argument("--step", type=int, metavar="N", help="the iteration to take, instead of the newest")

    def add(*names: str, **settings: Any) -> None:
        parser.add_argument(*names, **settings)

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
    """Write it, and say what was written."""
    from megatron.checkpoint.errors import CheckpointError
    from megatron.checkpoint.save_folder import checkpoint_name, iteration_of
    from megatron.checkpoint.storage_kinds import open_storage
    from megatron_lab.checkpoints.layout_files import files_of_layout
    from megatron_lab.checkpoints.stream import write_checkpoint
    from megatron_lab.foreign.opening import open_source
    from megatron_lab.foreign.source import StoredCheckpoint

    source = open_source(args.source, args.step)
    if not isinstance(source, StoredCheckpoint):
        raise CheckpointError(f"{args.source} is not a checkpoint of this program: bring it into one with the import command first")
    iteration = iteration_of(source.name)
    if iteration is None:
        raise CheckpointError(
            f"{source.name}: the folder's name does not say the iteration; it must be called iter_ and the number"
        )
    output = open_storage(args.output)
    if output.names(checkpoint_name(iteration)):
        raise CheckpointError(f"{output.at(checkpoint_name(iteration))} is there already: give another OUTPUT")
    config = with_layout(source.settings, args)
    files = files_of_layout(config.model, config.parallel, source.vocab_size, source.tensors)
    _check_complete(source, files)
    record = {**source.config, "config": {**source.config["config"], "parallel": dataclasses.asdict(config.parallel)}}
    written = write_checkpoint(
        args.output,
        iteration,
        source.tensors,
        source.read_stored,
        record,
        source.state,
        files=files,
        max_file_bytes=args.max_file_bytes,
        content_digest=source.manifest.content_digest,
    )
    before, after = source.manifest.content_digest, StoredCheckpoint(written).manifest.content_digest
    print(f"wrote {written}: files of {len(files)} ranks, content digest {after}" + (", as before" if before == after else ""))
    return 0


def with_layout(saved: Config, args: argparse.Namespace) -> Config:
    """The settings of the run with the layout asked for.

    Raises:
        ConfigError: the model cannot be laid out so; the message says what can.
    """
    from megatron.config.errors import ConfigError
    from megatron.config.flags import flags
    from megatron.config.parallel import ParallelConfig
    from megatron.config.rules import violations
    from megatron_lab.checkpoints.layout_files import replica_of

    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    plain = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    known = {flag.field: flag for flag in flags().values() if flag.topic == "parallel"}
    for name, value in plain.items():
        try:
            plain[name] = known[name].from_plain(value)
        except ValueError as error:
            raise ValueError(f"--{known[name].name} {value}: {error}") from error
    parallel = ParallelConfig(**plain)
    if saved.model.num_experts is not None and parallel.tensor_model_parallel_size > 1:
        parallel = dataclasses.replace(parallel, sequence_parallel=True)  # which changes nothing that is stored
    config = dataclasses.replace(saved, parallel=parallel)
    dense = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    of_experts = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    ranks = replica_of(parallel).world_size if min(*dense, *of_experts) > 0 else 0
    asked = {f"--{name.replace('_', '-')}" for name in plain}
    # Rules about anything else are none of a file's business.
    wrong = [violation for violation in violations(config, ranks) if asked.intersection(violation.flags) or ranks < 1]
    if wrong:
        raise ConfigError(wrong)
    return config


def _check_complete(source: StoredCheckpoint, files: list[list[tuple[str, Any]]]) -> None:
    """Nothing that is stored may be left out because the model has no such parameter."""
    from megatron.checkpoint.errors import CheckpointError, listed

    placed = {name for file in files for name, _ in file}
    if left := [name for name in source.tensors if name not in placed and 0 not in source.tensors[name].shape]:
        raise CheckpointError(f"{source.name} holds tensors that its model does not have: {listed(left)}")
