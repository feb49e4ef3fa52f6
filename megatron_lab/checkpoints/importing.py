"""Convert a Hugging Face folder, or a checkpoint of Megatron-LM, to a checkpoint that runs of any layout can load.

OUTPUT becomes a --save folder, with the tokenizer's files next to its checkpoint. The import of a Hugging Face folder is a
checkpoint of iteration 0 with only weights, in their original dtype. A run starts from it with --use-checkpoint-args and either
--pretrained-checkpoint OUTPUT or --load OUTPUT --finetune. The import from Megatron-LM (format torch or torch_dist) also contains
the iteration, optimizer state, counters, schedules and loss scale of the run. That run continues with --use-checkpoint-args --load
OUTPUT. Peak memory: one parameter; with --verify the complete model in float32. If tensors have values that are NaN or
infinite, they are listed and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILE_SETTINGS, DataConfig, sets_embedding_rows
from megatron.config.save import run_record
from megatron_lab.checkpoints.text import format_bytes
from megatron_lab.checkpoints.tokenizer_choice import add_tokenizer_arguments, parse_local_folder, select_tokenizer
from megatron_lab.tokenizers.embedding_rows import fit_tokenizer
from megatron_lab.tokenizers.file_names import TOKEN_ID_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from megatron.parallel.tensor_slice import TensorSlice
    from megatron_lab.checkpoints.added_tokens import NewToken
    from megatron_lab.foreign.source import TensorInfo, WeightSource

_TOKENIZER = "tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subcommand `import` to its parser."""
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, or a folder of Megatron-LM")
    parser.add_argument(
        "output", metavar="OUTPUT", type=parse_local_folder, help="the --save folder to write; must not exist, or be empty"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the iteration to take of several, instead of the newest")
    parser.add_argument("--ema", action="store_true", help="of a run with --ema-decay, take the moving average of the weights")
    parser.add_argument(
        "--embedding-rows",
        type=int,
        metavar="N",
        help="of Megatron-LM: rows of the word embedding without padding (the ids of the tokenizer)",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="of Megatron-LM: leave optimizer state, counts and schedules, and begin a new run with the weights",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare logits with transformers first, and write nothing if they differ by more than 1e-4",
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="write a checkpoint even if tensors of SOURCE have values that are NaN or infinite",
    )
    parser.add_argument(
        "--add-tokens",
        type=Path,
        metavar="FILE",
        help="add these tokens to the tokenizer (one per line, or a JSON list), with rows that are the mean of the others",
    )
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand `import`: write the checkpoint and print a summary. Returns the exit status."""
    from megatron_lab.checkpoints.finite_values import FiniteCheck
    from megatron_lab.checkpoints.stream import write_checkpoint
    from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
    from megatron_lab.tokenizers.fingerprint import build_config_entry

    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already and is not an empty folder. Choose another name, or remove it")
    source, tokenizer = _open_source_and_tokenizer(args)
    new_tokens = _read_new_tokens(args, source, tokenizer)
    verification = "not compared with transformers (--verify does, of a Hugging Face folder)"
    if args.verify:
        if not isinstance(source, HuggingFaceFolder):
            raise ValueError(f"--verify compares with transformers, which cannot read {args.source}. Remove --verify")
        import torch

        from megatron_lab.checkpoints.against_transformers import compare_logits

        verification = compare_logits(source, source.folder, torch.float64)
    try:
        data = DataConfig() if tokenizer is None else _copy_tokenizer(tokenizer, output / _TOKENIZER)
        if new_tokens:
            source, data = _add_tokens(source, data, new_tokens)
        content = _build_content(source, data, weights_only=args.weights_only)
        record, check = run_record(content.settings, sys.argv[1:]), FiniteCheck(source)
        path = write_checkpoint(
            output,
            content.iteration,
            content.tensors,
            check.wrap(content.read),
            {**record, "vocab_size": source.vocab_size, **build_config_entry(data)},
            content.state,
            before_commit=None if args.allow_nonfinite else check.raise_if_found,
        )
    except BaseException:
        shutil.rmtree(output / _TOKENIZER, ignore_errors=True)
        with contextlib.suppress(OSError):
            output.rmdir()  # it is empty again
        raise
    num_bytes = {name: info.dtype.itemsize * math.prod(info.shape) for name, info in content.tensors.items()}
    print(
        f"wrote {path}: {sum(math.prod(info.shape) for info in source.weights.values()):,} parameters"
        f"{content.description} ({format_bytes(sum(num_bytes.values()))}); "
        f"at most {format_bytes(max(num_bytes.values()))} of a tensor in memory at a time"
    )
    for note in [*source.notes, *filter(None, [check.describe()])]:
        print(f"note: {note}")
    print(verification)
    if content.iteration:
        print("its samples were in Megatron-LM's order: a run on the same data goes on in it with --data-order megatron")
    print(f"go on from it with --use-checkpoint-args {'--load' if content.iteration else '--pretrained-checkpoint'} {output}")
    return 0


class _Content(NamedTuple):
    """Content of the checkpoint that an import writes: iteration, settings of the run, and shape and dtype of each tensor by full
    name. `read` returns a slice of a tensor, `state` is the content of state.json, and `description` is text for the summary."""

    iteration: int
    settings: Config
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str, TensorSlice], torch.Tensor]
    state: dict[str, Any]
    description: str = ""


def _build_content(source: WeightSource, data: DataConfig, *, weights_only: bool) -> _Content:
    """Collect the content of the checkpoint to write: the complete state of a Megatron-LM run, or only the weights of the source.

    Raises:
        CheckpointError: the source has training state that cannot be converted exactly.
    """
    from megatron_lab.foreign.megatron_source import MegatronSource
    from megatron_lab.foreign.runs import convert_run_state, convert_settings

    if isinstance(source, MegatronSource) and not weights_only and (saved_run := source.saved_run) is not None:
        settings = convert_settings(source, data)
        state = convert_run_state(saved_run, settings, source.name)
        description = (
            f" with optimizer state, iteration {saved_run.iteration:,} after {state['progress']['consumed_samples']:,} samples"
        )
        return _Content(saved_run.iteration, settings, source.tensors, source.read_stored, state, description)
    if isinstance(source, MegatronSource):
        source.notes.append(
            "Left out: state of the optimizer and of the run." if weights_only else "It was saved without optimizer state."
        )
    weights = {f"model.{name}": info for name, info in source.weights.items()}

    def read(name: str, tensor_slice: TensorSlice) -> torch.Tensor:
        return source.read(name.removeprefix("model."), tensor_slice)

    return _Content(0, Config(model=source.model, data=data), weights, read, {"has_optimizer": False})


def _open_source_and_tokenizer(args: argparse.Namespace) -> tuple[WeightSource, DataConfig | None]:
    """Open the source, and select the settings of its tokenizer (None with --no-tokenizer).

    Rows that Megatron-LM added to the word embedding as padding are removed.

    Raises:
        ValueError: the tokenizer does not fit the embedding, or a flag has no effect on this source.
    """
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.foreign.adapters import merge_adapters
    from megatron_lab.foreign.megatron_source import MegatronSource
    from megatron_lab.foreign.open_source import open_source

    source = merge_adapters(open_source(args.source, args.step, average=args.ema))
    from_megatron = isinstance(source, MegatronSource)
    if args.weights_only and not from_megatron:
        raise ValueError(f"--weights-only has no effect on {args.source}, of which only the weights are read. Remove the flag")
    if args.embedding_rows is not None and not from_megatron:
        raise ValueError(f"--embedding-rows has no effect on {args.source}, which records its number of rows. Remove the flag")
    tokenizer = select_tokenizer(args, source)
    num_ids = None if tokenizer is None else build_tokenizer(tokenizer).vocab_size
    num_rows = args.embedding_rows or num_ids
    if (
        isinstance(source, MegatronSource)
        and args.embedding_rows is None
        and num_ids is not None
        and not source.pads_to_stored_rows(num_ids)
    ):
        raise ValueError(
            f"the tokenizer has {num_ids:,} ids. Megatron-LM would not pad them to the number of rows in the embedding of "
            f"{args.source}, so the tokenizer may belong to another model. If it is the right tokenizer, set --embedding-rows to "
            "the number of rows without padding"
        )
    if from_megatron and num_rows is not None and num_rows != source.vocab_size:
        source = open_source(args.source, args.step, vocab_size=num_rows)
    if tokenizer is None or num_ids is None:
        return source, tokenizer
    tokenizer, fitted_tokenizer = fit_tokenizer(tokenizer, source.vocab_size, source.name)
    source.notes.extend((*fitted_tokenizer.notes, *fitted_tokenizer.text_notes))
    if num_ids >= source.vocab_size:
        return source, tokenizer
    if not sets_embedding_rows(tokenizer.tokenizer_type):
        raise ValueError(
            f"{source.name} has {source.vocab_size:,} rows in its embedding, but the tokenizer {tokenizer.tokenizer_type} has "
            f"{num_ids:,} ids. Choose the tokenizer of this model"
        )
    source.notes.append(
        f"the embedding has {source.vocab_size:,} rows, the tokenizer {num_ids:,} ids: all rows are kept (--vocab-size)"
    )
    return source, dataclasses.replace(tokenizer, vocab_size=source.vocab_size)


def _read_new_tokens(args: argparse.Namespace, source: WeightSource, tokenizer: DataConfig | None) -> list[NewToken]:
    """Return the tokens of --add-tokens; an empty list without the flag.

    Raises:
        ValueError: the file is not valid, the tokenizer cannot be extended, or the source has optimizer state for its rows.
    """
    if args.add_tokens is None:
        return []
    from megatron_lab.checkpoints.added_tokens import read_new_tokens
    from megatron_lab.foreign.megatron_source import MegatronSource

    if tokenizer is None:
        raise ValueError("--add-tokens extends the tokenizer, but --no-tokenizer leaves it out. Remove one of the flags")
    if tokenizer.tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError(
            f"--add-tokens extends the tokenizer.json of a HuggingFaceTokenizer, but the tokenizer of {source.name} is a "
            f"{tokenizer.tokenizer_type}. Remove the flag, or set --tokenizer-type HuggingFaceTokenizer and --tokenizer-model"
        )
    if isinstance(source, MegatronSource) and not args.weights_only and source.saved_run is not None:
        raise ValueError(
            "--add-tokens needs --weights-only here: the optimizer state of the run has no rows for new tokens. Add --weights-only"
        )
    return read_new_tokens(args.add_tokens)


def _add_tokens(source: WeightSource, data: DataConfig, tokens: Sequence[NewToken]) -> tuple[WeightSource, DataConfig]:
    """Add tokens to the copied tokenizer, and rows for them to the weights. Return both, with notes for the user in the source."""
    from megatron_lab.checkpoints.added_tokens import ExtendedSource, add_to_tokenizer
    from megatron_lab.data_tools.preprocess.text_encoding import format_count

    added = add_to_tokenizer(Path(str(data.tokenizer_model)), tokens)
    num_rows = source.vocab_size
    new_num_rows = max(num_rows, *(id + 1 for id in (*added.ids.values(), *added.existing.values())))
    notes = [
        f"{name!r} of --add-tokens is left out: the tokenizer has it already, with the id {id}"
        + ("; it gets a row in the embedding, the mean of the others" if id >= num_rows else "")
        for name, id in added.existing.items()
    ]
    if added.ids:
        first, last = min(added.ids.values()), max(added.ids.values())
        num_old_rows = sum(id < num_rows for id in added.ids.values())
        notes.append(
            f"--add-tokens adds {format_count(len(added.ids), 'token')}, id {first}{f' to {last}' if last > first else ''}, with "
            f"{format_count(num_old_rows, 'old row')} of the embedding, which keep their values, and "
            f"{format_count(new_num_rows - num_rows, 'new row')}, the mean of the others"
        )
    if new_num_rows > num_rows:
        source = ExtendedSource(source, new_num_rows)
    # Without a number of rows, each id has a row.
    data = dataclasses.replace(data, vocab_size=None if new_num_rows == added.num_ids else new_num_rows)
    source.notes.extend(notes)
    return source, data


def _copy_tokenizer(tokenizer: DataConfig, folder: Path) -> DataConfig:
    """Copy the files of a tokenizer, and the files that belong to it, into a folder. Return the tokenizer's settings with the new
    paths."""
    from megatron_lab.data_tools.huggingface_tokenizer import EXTRA_FILES
    from megatron_lab.tokenizers.template_files import TEMPLATE_FOLDER

    paths = {name: Path(getattr(tokenizer, name)) for name in TOKENIZER_FILE_SETTINGS if getattr(tokenizer, name) is not None}
    if paths:
        folder.mkdir(parents=True)
    for name, file in paths.items():
        if file.is_dir():
            file = paths[name] = file / "tokenizer.json"
        shutil.copyfile(file, folder / file.name)
        companions = EXTRA_FILES if tokenizer.tokenizer_type == "HuggingFaceTokenizer" else ()
        for companion in (*companions, *TOKEN_ID_FILES):
            if (file.parent / companion).is_file():
                shutil.copyfile(file.parent / companion, folder / companion)
        if companions and (file.parent / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(file.parent / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
    copied_paths: dict[str, Any] = {name: os.path.realpath(folder / file.name) for name, file in paths.items()}
    return dataclasses.replace(tokenizer, **copied_paths)
