"""Inspect an indexed dataset, or the samples that a training run reads.

    python tools/inspect_data.py PREFIX                             sizes, and a histogram of document lengths
    python tools/inspect_data.py PREFIX --histogram lengths.svg     the histogram also as a picture
    python tools/inspect_data.py PREFIX --document 0 17             token ids of documents; with tokenizer flags also their text
    python tools/inspect_data.py PREFIX --verify                    check sizes, order of the index, and the range of token ids
    python tools/inspect_data.py PREFIX --write-fingerprint         with tokenizer flags: record which tokenizer wrote the dataset
    python tools/inspect_data.py --run checkpoints --step 1200      documents and token ranges in the batch of a step
    python tools/inspect_data.py --run checkpoints --sample 38400   one sample of the run, with its text

--run names the --save folder of a run. Its newest checkpoint, or that of --ckpt-step, gives the settings and the history of the
data that the run has read. Steps are counted from 1 as in the log, samples and documents from 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.optional_packages import import_optional
from megatron_lab.checkpoints.text import parse_step
from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, build_tokenizer_config
from megatron_lab.terminal import format_table

if TYPE_CHECKING:
    from megatron.config.data import DataConfig
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.samples import DocumentSpan
    from megatron.data.tokenizer import Tokenizer
    from megatron_lab.data_tools.dataset_check import DatasetProblem, LengthBin

_MAX_PRINTED_PROBLEMS = 20
_MAX_BAR_LENGTH = 30  # characters
_ANY_ID = 2**63


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("prefix", nargs="?", metavar="PREFIX", help="Path of an indexed dataset without .bin and .idx.")
    parser.add_argument("--run", metavar="FOLDER", help="Inspect the training run with this --save folder, instead of PREFIX.")
    parser.add_argument(
        "--ckpt-step",
        type=parse_step,
        metavar="N|best",
        help="With --run, load the settings from the checkpoint of this iteration (default: the newest).",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--document", type=int, nargs="+", metavar="N", help="With PREFIX, print these documents.")
    action.add_argument(
        "--verify", action="store_true", help="With PREFIX, check all data; the exit status is 1 if it has a problem."
    )
    action.add_argument(
        "--histogram",
        metavar="FILE",
        help="With PREFIX, also write the histogram of document lengths to FILE (.svg, .png or .pdf).",
    )
    action.add_argument(
        "--write-fingerprint",
        action="store_true",
        help="With PREFIX, record in PREFIX.tokenizer that the tokenizer of the flags wrote this dataset, so that training refuses "
        "another tokenizer. For datasets of other programs; the first text is printed for a check.",
    )
    action.add_argument("--step", type=int, metavar="N", help="With --run, list the samples of this step.")
    action.add_argument("--sample", type=int, metavar="N", help="With --run, print this sample.")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="Print at most N tokens of a document or sample (default 256); 0 prints all.",
    )
    parser.add_argument("--json", action="store_true", help="With --run, print one JSON object per sample.")
    add_tokenizer_flags(parser, required=False, encodes=False)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0 for success, 1 for problems of the data, 2 for invalid flags."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    _check_args(parser, args)
    tokenizer = build_tokenizer_config(args, parser)
    try:
        return _show_run(args) if args.run is not None else _show_dataset(args, tokenizer)
    except BrokenPipeError:  # the reader has closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"inspect_data.py: error: {error}", file=sys.stderr)
        return 1


def _check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that the flags can be used together. Otherwise the program ends with a message and status 2."""
    if (args.prefix is None) == (args.run is None):
        parser.error("give either PREFIX or --run FOLDER")
    for name, needs_run in {
        "ckpt_step": True,
        "step": True,
        "sample": True,
        "json": True,
        "document": False,
        "verify": False,
        "write_fingerprint": False,
    }.items():
        if getattr(args, name) not in (None, False) and needs_run != (args.run is not None):
            parser.error(f"--{name.replace('_', '-')} can only be used with {'--run FOLDER' if needs_run else 'PREFIX'}")
    if args.run is not None and (args.histogram or args.tokenizer_type):
        parser.error(
            "--histogram can only be used with PREFIX"
            if args.histogram
            else "--run uses the tokenizer of the run: leave out --tokenizer-type"
        )
    if args.run is not None and args.step is None and args.sample is None:
        parser.error("--run needs --step N or --sample N")
    if args.write_fingerprint and args.tokenizer_type is None:
        parser.error("--write-fingerprint needs the flags of the dataset's tokenizer (--tokenizer-type and its files)")
    if args.max_tokens < 0:
        parser.error(f"--max-tokens must be 0 or more, not {args.max_tokens}")


def _show_dataset(args: argparse.Namespace, config: DataConfig) -> int:
    """Print what the flags ask for: documents, or the dataset's sizes with either its problems (--verify) or its document lengths.
    Return the exit status."""
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.data_tools.dataset_check import compute_length_histogram, find_problems

    tokenizer = build_tokenizer(config) if config.tokenizer_type else None
    dataset = IndexedDataset(args.prefix)
    if args.document is not None:
        for document_index in args.document:
            _show_document(dataset, document_index, tokenizer, args.max_tokens)
        return 0
    if args.write_fingerprint:
        assert tokenizer is not None, "checked with the flags"
        _write_fingerprint(dataset, tokenizer, config, args.max_tokens)
        return 0
    print(_format_sizes(dataset))
    if args.verify:
        return _report_problems(dataset, find_problems(dataset, tokenizer.vocab_size if tokenizer else _ANY_ID), tokenizer)
    bins = compute_length_histogram(dataset)
    print("\n".join(format_histogram(bins)))
    if args.histogram is not None:
        save_histogram(bins, Path(dataset.prefix).name, Path(args.histogram))
        print(f"drawn: {args.histogram}")
    return 0


def _format_sizes(dataset: IndexedDataset) -> str:
    from megatron.data.indexed_dataset import fingerprint, get_loss_mask_prefix, has_loss_mask
    from megatron_lab.tokenizers.fingerprint import read_dataset_fingerprint

    written_with = read_dataset_fingerprint(dataset.prefix) or "unknown (no PREFIX.tokenizer)"
    tokens = dataset.count_tokens(range(dataset.num_documents))
    masked = f", with a loss mask ({get_loss_mask_prefix(dataset.prefix)})" if has_loss_mask(dataset.prefix) else ""
    return (
        f"{dataset.prefix}: {dataset.num_documents:,} documents in {len(dataset.lengths):,} sequences, {tokens:,} tokens of "
        f"{dataset.dtype.name}, fingerprint {fingerprint(dataset)}{masked}\n"
        f"tokenizer: {written_with}"
    )


def _write_fingerprint(dataset: IndexedDataset, tokenizer: Tokenizer, config: DataConfig, max_tokens: int) -> None:
    """Write the fingerprint of the tokenizer with which another program has written a dataset, and print the first text.

    Raises:
        ValueError: the dataset has ids that the tokenizer lacks, or has the fingerprint of another tokenizer.
    """
    from megatron.data.indexed_dataset import get_tokenizer_file
    from megatron_lab.data_tools.dataset_check import find_problems
    from megatron_lab.tokenizers.fingerprint import get_fingerprint, read_dataset_fingerprint, write_dataset_fingerprint

    path, fingerprint = get_tokenizer_file(dataset.prefix), get_fingerprint(config, tokenizer)
    stored = read_dataset_fingerprint(dataset.prefix)
    if stored is not None and stored != fingerprint:
        raise ValueError(f"{path} exists, for the tokenizer {stored}.\n  If it is wrong, remove this file first.")
    if (problem := next(find_problems(dataset, tokenizer.vocab_size), None)) is not None:
        raise ValueError(
            f"{problem.message}\n  The dataset is damaged, or was written with another tokenizer: no fingerprint is written."
        )
    if dataset.num_documents:
        _show_document(dataset, 0, tokenizer, max_tokens)
    write_dataset_fingerprint(dataset.prefix, fingerprint)
    print(f"wrote {path}: {fingerprint}. If the text above is not that of the dataset, remove the file")


def _show_document(dataset: IndexedDataset, document_index: int, tokenizer: Tokenizer | None, max_tokens: int) -> None:
    """Print the token ids of a document. Also print its text if a tokenizer is known, and the tokens that a loss mask includes in
    the loss."""
    if not 0 <= document_index < dataset.num_documents:
        raise ValueError(
            f"--document {document_index}: {dataset.prefix} has documents 0 to {dataset.num_documents - 1:,}. "
            "Choose a document in this range."
        )
    from megatron.data.indexed_dataset import has_loss_mask, open_loss_mask
    from megatron.data.samples import IN_LOSS

    ids = dataset.get_document(document_index).tolist()
    print(f"document {document_index:,}: {len(ids):,} tokens")
    _show_ids(ids, tokenizer, max_tokens)
    if has_loss_mask(dataset.prefix):
        is_in_loss = (open_loss_mask(dataset).get_document(document_index) & IN_LOSS > 0).tolist()
        print(f"  learned with --data-loss-mask: {sum(is_in_loss):,} of {len(ids):,} tokens")
        pairs = zip(ids[: max_tokens or None], is_in_loss, strict=False)
        for in_loss, token_pairs in itertools.groupby(pairs, key=lambda pair: pair[1]):
            if in_loss:
                loss_ids = [id for id, _ in token_pairs]
                print("    " + (" ".join(map(str, loss_ids)) if tokenizer is None else repr(tokenizer.decode(loss_ids))))


def _show_ids(ids: list[int], tokenizer: Tokenizer | None, max_tokens: int) -> None:
    first_ids = ids[: max_tokens or None]
    remaining = f" ... and {len(ids) - len(first_ids):,} more (--max-tokens)" if len(first_ids) < len(ids) else ""
    print(f"  ids: {' '.join(map(str, first_ids))}{remaining}")
    if tokenizer is not None:
        text = "".join(_iter_text(first_ids, tokenizer))
        print("  text: " + text.replace("\n", "\n        ") + remaining)


def _iter_text(ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of token ids. Each end-of-document token is shown as "[end of document ID]" with its id."""
    start = 0
    for i, id in enumerate([*ids, tokenizer.eod]):
        if id == tokenizer.eod:
            yield tokenizer.decode(ids[start:i])
            if i < len(ids):
                yield f"\n[end of document {id}]\n"
            start = i + 1


def _report_problems(dataset: IndexedDataset, problems: Iterator[DatasetProblem], tokenizer: Tokenizer | None) -> int:
    """Print the problems of a dataset. Return the exit status: 1 if there are problems, otherwise 0.

    Args:
        tokenizer: tokenizer whose vocabulary size bounded the ids in the check; None if only negative ids counted as problems.
    """
    num_problems = 0
    for num_problems, problem in enumerate(problems, start=1):
        if num_problems <= _MAX_PRINTED_PROBLEMS:
            print(problem.message)
    if num_problems > _MAX_PRINTED_PROBLEMS:
        print(f"... and {num_problems - _MAX_PRINTED_PROBLEMS:,} more")
    id_check = (
        f"ids below {tokenizer.vocab_size:,}"
        if tokenizer
        else "ids not negative (give the tokenizer's flags to check against its vocabulary)"
    )
    print(
        f"{num_problems:,} problems: {dataset.prefix} should be written again"
        if num_problems
        else f"sound: sizes, order of the index, {id_check}"
    )
    return 1 if num_problems else 0


def format_histogram(bins: list[LengthBin]) -> list[str]:
    """Format the histogram of document lengths as lines of text with bars.

    Args:
        bins: ranges of document lengths, with the number of documents and tokens in each.
    """
    max_documents = max((length_bin.num_documents for length_bin in bins), default=0)
    rows = [("tokens", "documents", "tokens in them", "")]
    for length_bin in bins:
        name = f"{length_bin.low:,}" if length_bin.low == length_bin.high else f"{length_bin.low:,} to {length_bin.high:,}"
        bar = (
            "#" * max(round(_MAX_BAR_LENGTH * length_bin.num_documents / max_documents), 1 if length_bin.num_documents else 0)
            if max_documents
            else ""
        )
        rows.append((name, f"{length_bin.num_documents:,}", f"{length_bin.num_tokens:,}", bar))
    return format_table(rows, right_aligned=(0, 1, 2))


def save_histogram(bins: list[LengthBin], name: str, path: Path) -> None:
    """Save a figure that shows how documents and tokens are distributed over document lengths.

    Args:
        bins: ranges of document lengths, with the number of documents and tokens in each.
        name: name of the dataset without its folder.
        path: file to write; its suffix selects the format.

    Raises:
        ValueError: matplotlib is missing, or does not support the file format.
    """
    fig = import_optional("matplotlib.figure", "--histogram needs matplotlib").Figure(figsize=(8, 4.5), layout="constrained")
    ax = fig.subplots()
    positions = range(len(bins))
    for shift, label, values, colour in (
        (-0.2, "documents", [length_bin.num_documents for length_bin in bins], "#4477aa"),
        (0.2, "tokens", [length_bin.num_tokens for length_bin in bins], "#ccbb44"),
    ):
        total = max(sum(values), 1)
        ax.bar(
            [position + shift for position in positions], [100 * value / total for value in values], 0.4, label=label, color=colour
        )
    ranges = [
        f"{length_bin.low:,}" + (f" to {length_bin.high:,}" if length_bin.high > length_bin.low else "") for length_bin in bins
    ]
    ax.set_xticks(positions, ranges, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_xlabel("tokens in a document")
    ax.set_ylabel("% of all documents, of all tokens")
    num_documents, num_tokens = (
        sum(getattr(length_bin, field) for length_bin in bins) for field in ("num_documents", "num_tokens")
    )
    ax.set_title(f"{name}: {num_documents:,} documents, {num_tokens:,} tokens", loc="left", fontsize=11)
    for side in ("right", "top"):
        ax.spines[side].set_visible(False)
    ax.legend()
    fig.savefig(path)


def _show_run(args: argparse.Namespace) -> int:
    """Print which documents are in the samples of one step of a run (--step), or in one sample (--sample). Return the exit
    status."""
    from megatron_lab.data_tools.run_lineage import RunLineage

    lineage = RunLineage.from_save_folder(Path(args.run), args.ckpt_step)
    sample_indices = lineage.get_step_samples(args.step) if args.step is not None else range(args.sample, args.sample + 1)
    if args.step is not None and not args.json:
        print(
            f"step {args.step:,}: {len(sample_indices):,} samples, "
            f"{sample_indices.start:,} to {sample_indices.stop - 1:,} ({lineage.origin})"
        )
    for sample_index, spans, ids in lineage.iter_samples(sample_indices):
        if args.json:
            print(json.dumps({"sample": sample_index, "pieces": [vars(span) for span in spans]}))
            continue
        print(f"sample {sample_index:,}{' (passed over after a loss spike)' if lineage.is_skipped(sample_index) else ''}")
        for span in spans:
            print(f"  {_format_span(span)}")
        if args.sample is not None:
            _show_ids(ids, lineage.tokenizer, args.max_tokens)
    return 0


def _format_span(span: DocumentSpan) -> str:
    last_token = span.first_token + span.num_tokens - 1
    tokens = f"tokens {span.first_token:,} to {last_token:,}" if span.num_tokens > 1 else f"token {last_token:,}"
    return f"{span.prefix}: document {span.document:,}, {tokens}"
