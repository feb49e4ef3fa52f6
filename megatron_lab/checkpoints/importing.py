"""Write a Hugging Face folder, or a checkpoint of Megatron-LM, as a checkpoint to continue from at any layout.

OUTPUT becomes a --save folder, with the files of the tokenizer beside its checkpoint. Of a Hugging Face folder that has iteration
0, and weights alone, in their own type: a run begins with them by --use-checkpoint-args and either --pretrained-checkpoint OUTPUT
or --load OUTPUT --finetune. Of Megatron-LM, in the format torch or torch_dist, it has the iteration, optimizer state, counts,
schedules and loss scale of the run too, which goes on by --use-checkpoint-args --load OUTPUT. The peak of memory is one parameter;
with --verify the whole model in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILES, DataConfig, run_settings, tokenizer_settings
from megatron.config.save import run_record
from megatron_lab.checkpoints.text import size
from megatron_lab.checkpoints.tokenizer_choice import add_choice, chosen_tokenizer, local_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from megatron.parallel.boxes import Box
    from megatron_lab.foreign.source import TensorInfo, WeightSource

_TOKENIZER = "tokenizer"
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files beside a tokenizer.json that belong to it, or say which of its tokens have a role."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, or a folder of Megatron-LM")
    parser.add_argument(
        "output", metavar="OUTPUT", type=local_folder, help="the --save folder to write; must not exist, or be empty"
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
    add_choice(parser)


def run(args: argparse.Namespace) -> int:
    """Import and say what was written."""
    from megatron_lab.checkpoints.stream import write_checkpoint
    from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder

    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; choose another name, or remove it")
    source, tokenizer = _open(args)
    checked = "not compared with transformers (--verify does, of a Hugging Face folder)"
    if args.verify:
        if not isinstance(source, HuggingFaceFolder):
            raise ValueError(f"--verify compares with transformers, which does not read {args.source}: leave it out")
        import torch

        from megatron_lab.checkpoints.against_transformers import compare_logits

        checked = compare_logits(source, source.folder, torch.float64)
    try:
        data = DataConfig() if tokenizer is None else _copied(tokenizer, output / _TOKENIZER)
        content = _content(source, data, weights_only=args.weights_only)
        record = run_record(content.settings, sys.argv[1:])
        written = write_checkpoint(
            output,
            content.iteration,
            content.tensors,
            content.read,
            {**record, "vocab_size": source.vocab_size},
            content.state,
        )
    except BaseException:
        shutil.rmtree(output / _TOKENIZER, ignore_errors=True)
        with contextlib.suppress(OSError):
            output.rmdir()  # empty again
        raise
    num_bytes = {name: info.dtype.itemsize * math.prod(info.shape) for name, info in content.tensors.items()}
    print(
        f"wrote {written}: {sum(math.prod(info.shape) for info in source.weights.values()):,} parameters"
        f"{content.told} ({size(sum(num_bytes.values()))}); at most {size(max(num_bytes.values()))} of a tensor in memory at a time"
    )
    for note in source.notes:
        print(f"note: {note}")
    print(checked)
    if content.iteration:
        print("its samples were in Megatron-LM's order: a run on the same data goes on in it with --data-order megatron")
    print(f"go on from it with --use-checkpoint-args {'--load' if content.iteration else '--pretrained-checkpoint'} {output}")
    return 0


class _Content(NamedTuple):
    """What goes into the checkpoint."""

    iteration: int
    settings: Config
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str, Box], torch.Tensor]
    state: dict[str, Any]
    told: str = ""


def _content(source: WeightSource, data: DataConfig, *, weights_only: bool) -> _Content:
    """The weights of a source, or the whole state of a run of Megatron-LM.

    Raises:
        CheckpointError: the state is there and cannot be read exactly.
    """
    from megatron_lab.foreign.megatron_source import MegatronSource
    from megatron_lab.foreign.runs import settings_of, state_of

    if isinstance(source, MegatronSource) and not weights_only and (run := source.saved) is not None:
        settings = settings_of(source, data)
        state = state_of(run, settings, source.name)
        told = f" with optimizer state, iteration {run.iteration:,} after {state['progress']['consumed_samples']:,} samples"
        return _Content(run.iteration, settings, source.tensors, source.read_stored, state, told)
    if isinstance(source, MegatronSource):
        source.notes.append(
            "Left out: state of the optimizer and of the run." if weights_only else "It was saved without optimizer state."
        )
    weights = {f"model.{name}": info for name, info in source.weights.items()}

    def read(name: str, box: Box) -> torch.Tensor:
        return source.read(name.removeprefix("model."), box)

    return _Content(0, Config(model=source.model, data=data), weights, read, {"has_optimizer": False})


def _open(args: argparse.Namespace) -> tuple[WeightSource, DataConfig | None]:
    """The weights and the tokenizer; the vocabulary of a checkpoint of Megatron-LM without its padding."""
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.foreign.adapters import merged
    from megatron_lab.foreign.megatron_source import MegatronSource
    from megatron_lab.foreign.opening import open_source

    source = merged(open_source(args.source, args.step, average=args.ema))
    from_megatron = isinstance(source, MegatronSource)
    if args.weights_only and not from_megatron:
        raise ValueError(f"--weights-only has no effect on {args.source}, of which nothing else is read: leave it out")
    if args.embedding_rows is not None and not from_megatron:
        raise ValueError(f"--embedding-rows has no effect on {args.source}, which says how many rows it has: leave it out")
    tokenizer = chosen_tokenizer(args, source)
    ids = None if tokenizer is None else build_tokenizer(tokenizer).vocab_size
    rows = args.embedding_rows or ids
    if isinstance(source, MegatronSource) and args.embedding_rows is None and ids is not None and not source.pads_to_this(ids):
        raise ValueError(
            f"the tokenizer has {ids:,} ids, which Megatron-LM does not pad to the rows that {args.source} has: it may be another "
            "one's. If it is its tokenizer, say by --embedding-rows how many rows are no padding"
        )
    if from_megatron and rows is not None and rows != source.vocab_size:
        source = open_source(args.source, args.step, vocab_size=rows)
    if tokenizer is None or ids is None or ids == source.vocab_size:
        return source, tokenizer
    if ids > source.vocab_size:
        raise ValueError(
            f"the tokenizer has {ids:,} ids, but {source.name} only {source.vocab_size:,} rows in its embedding: this is not its "
            "tokenizer"
        )
    kind = str(tokenizer.tokenizer_type)
    if "vocab_size" not in run_settings(kind) or "vocab_size" in tokenizer_settings(kind):
        raise ValueError(f"{source.name} has {source.vocab_size:,} rows in its embedding, but {kind} {ids:,} ids")
    source.notes.append(
        f"the embedding has {source.vocab_size:,} rows, the tokenizer {ids:,} ids: all rows are kept (--vocab-size)"
    )
    return source, dataclasses.replace(tokenizer, vocab_size=source.vocab_size)


def _copied(tokenizer: DataConfig, folder: Path) -> DataConfig:
    """The settings of a tokenizer whose files were copied into a folder."""
    files = {name: Path(getattr(tokenizer, name)) for name in TOKENIZER_FILES if getattr(tokenizer, name) is not None}
    if files:
        folder.mkdir(parents=True)
    for name, file in files.items():
        if file.is_dir():
            file = files[name] = file / "tokenizer.json"
        shutil.copyfile(file, folder / file.name)
        if tokenizer.tokenizer_type == "HuggingFaceTokenizer":
            for beside in _BESIDE:
                if (file.parent / beside).is_file():
                    shutil.copyfile(file.parent / beside, folder / beside)
    copies: dict[str, Any] = {name: str((folder / file.name).resolve()) for name, file in files.items()}
    return dataclasses.replace(tokenizer, **copies)
