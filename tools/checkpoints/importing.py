"""Write the weights of a Hugging Face folder, or of a checkpoint of Megatron-LM, as a checkpoint to continue from at any layout.

OUTPUT becomes a --save folder with iteration 0: weights alone, in their own type, and the files of the tokenizer beside it. A run
begins with them by --use-checkpoint-args and either --pretrained-checkpoint OUTPUT or --load OUTPUT --finetune. The peak of memory
is one parameter; with --verify the whole model in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.config import Config
from megatron.config.data import TOKENIZER_FILES, DataConfig, run_settings, tokenizer_settings
from megatron.config.save import run_record
from tools.checkpoints.text import size
from tools.checkpoints.tokenizer_choice import add_choice, chosen_tokenizer, local_folder

if TYPE_CHECKING:
    from megatron.checkpoint.source import WeightSource

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
        "--verify",
        action="store_true",
        help="compare logits with transformers first, and write nothing if they differ by more than 1e-4",
    )
    add_choice(parser)


def run(args: argparse.Namespace) -> int:
    """Import and say what was written."""
    from megatron.checkpoint.huggingface.folder import HuggingFaceFolder
    from tools.checkpoints.stream import write_checkpoint

    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already; choose another name, or remove it")
    source, tokenizer = _open(args)
    checked = "not compared with transformers (--verify does, of a Hugging Face folder)"
    if args.verify:
        if not isinstance(source, HuggingFaceFolder):
            raise ValueError(f"--verify compares with transformers, which does not read {args.source}: leave it out")
        import torch

        from tools.checkpoints.against_transformers import compare_logits

        checked = compare_logits(source, source.folder, torch.float64)
    try:
        data = DataConfig() if tokenizer is None else _copied(tokenizer, output / _TOKENIZER)
        record = run_record(Config(model=source.model, data=data), sys.argv[1:])
        written = write_checkpoint(
            output,
            0,
            {f"model.{name}": info for name, info in source.weights.items()},
            lambda name, box: source.read(name.removeprefix("model."), box),
            {**record, "vocab_size": source.vocab_size},
            {"has_optimizer": False},
        )
    except BaseException:
        shutil.rmtree(output / _TOKENIZER, ignore_errors=True)
        with contextlib.suppress(OSError):
            output.rmdir()  # empty again
        raise
    num_bytes = {name: info.dtype.itemsize * math.prod(info.shape) for name, info in source.weights.items()}
    print(
        f"wrote {written}: {sum(math.prod(info.shape) for info in source.weights.values()):,} parameters "
        f"({size(sum(num_bytes.values()))}); at most {size(max(num_bytes.values()))} of weights in memory at a time"
    )
    for note in source.notes:
        print(f"note: {note}")
    print(checked)
    print(f"go on from it with --use-checkpoint-args --pretrained-checkpoint {output}")
    return 0


def _open(args: argparse.Namespace) -> tuple[WeightSource, DataConfig | None]:
    """The weights and the tokenizer; the vocabulary of a checkpoint of Megatron-LM without its padding."""
    from megatron.checkpoint.adapters import merged
    from megatron.checkpoint.legacy_checkpoint import LegacyCheckpoint
    from megatron.checkpoint.source import open_source
    from megatron.data.tokenizers.tokenizer import build_tokenizer

    source = merged(open_source(args.source, args.step, average=args.ema))
    is_legacy = isinstance(source, LegacyCheckpoint)
    if args.embedding_rows is not None and not is_legacy:
        raise ValueError(f"--embedding-rows has no effect on {args.source}, which says how many rows it has: leave it out")
    tokenizer = chosen_tokenizer(args, source)
    ids = None if tokenizer is None else build_tokenizer(tokenizer).vocab_size
    rows = args.embedding_rows or ids
    if isinstance(source, LegacyCheckpoint) and args.embedding_rows is None and ids is not None and not source.pads_to_this(ids):
        raise ValueError(
            f"the tokenizer has {ids:,} ids, which Megatron-LM does not pad to the rows that {args.source} has: it may be another "
            "one's. If it is its tokenizer, say by --embedding-rows how many rows are no padding"
        )
    if is_legacy and rows is not None and rows != source.vocab_size:
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
