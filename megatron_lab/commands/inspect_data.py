"""Look into an indexed dataset, or into what a training run reads.

    python tools/inspect_data.py PREFIX                             sizes, and a histogram of the lengths of the documents
    python tools/inspect_data.py PREFIX --histogram lengths.svg     the histogram as a picture too
    python tools/inspect_data.py PREFIX --document 0 17             token ids of documents; with a tokenizer's flags their text
    python tools/inspect_data.py PREFIX --verify                    read all: sizes, order of the index, ids below the vocabulary
    python tools/inspect_data.py --run checkpoints --step 1200      documents and token ranges in the batch of a step
    python tools/inspect_data.py --run checkpoints --sample 38400   one sample of the run, with its text

A run is named by its --save folder: the settings, and what was read under earlier ones, are taken from its newest checkpoint
(--ckpt-step takes another). Steps are counted from 1 as in the log, samples and documents from 0.
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

from megatron.config.extras import optional
from megatron_lab.commands.parser import ToolParser
from megatron_lab.data_tools.tokenizer_flags import add_tokenizer_flags, tokenizer_config

if TYPE_CHECKING:
    from megatron.config.data import DataConfig
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.samples import SamplePiece
    from megatron.data.tokenizer import Tokenizer
    from megatron_lab.data_tools.dataset_check import DatasetProblem, LengthBin

_SHOWN_PROBLEMS = 20
_BAR = 40  # characters
_ANY_ID = 2**63


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    flags.add_argument("prefix", nargs="?", metavar="PREFIX", help="indexed dataset: path without .bin and .idx")
    flags.add_argument("--run", metavar="FOLDER", help="--save folder of a training run, instead of PREFIX")
    flags.add_argument(
        "--ckpt-step", type=int, metavar="N", help="with --run: the checkpoint to take the settings from (the newest)"
    )
    what = flags.add_mutually_exclusive_group()
    what.add_argument("--document", type=int, nargs="+", metavar="N", help="with PREFIX: show these documents")
    what.add_argument("--verify", action="store_true", help="with PREFIX: read everything; exit code 1 if something is wrong")
    what.add_argument("--histogram", metavar="FILE", help="with PREFIX: draw the lengths of the documents (.svg, .png or .pdf)")
    what.add_argument("--step", type=int, metavar="N", help="with --run: list what this step reads")
    what.add_argument("--sample", type=int, metavar="N", help="with --run: show this sample")
    flags.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="tokens shown of a document or sample (256); 0: all"
    )
    flags.add_argument("--json", action="store_true", help="with --run: one JSON object a sample")
    add_tokenizer_flags(flags, required=False)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 1 if something is wrong with the data, 2 for wrong flags."""
    flags = parser()
    given = flags.parse_args(arguments)
    _check(flags, given)
    tokenizer = tokenizer_config(given, flags)
    try:
        return _show_run(given) if given.run is not None else _show_dataset(given, tokenizer)
    except BrokenPipeError:  # whoever reads has seen enough, as in | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"inspect_data.py: error: {error}", file=sys.stderr)
        return 1


def _check(flags: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with a message where flags do not go together."""
    if (given.prefix is None) == (given.run is None):
        flags.error("give either PREFIX or --run FOLDER")
    for name, needs_run in {
        "ckpt_step": True,
        "step": True,
        "sample": True,
        "json": True,
        "document": False,
        "verify": False,
    }.items():
        if getattr(given, name) not in (None, False) and needs_run != (given.run is not None):
            flags.error(f"--{name.replace('_', '-')} goes with {'--run FOLDER' if needs_run else 'PREFIX'}")
    if given.run is not None and (given.histogram or given.tokenizer_type):
        flags.error(
            "--histogram goes with PREFIX" if given.histogram else "the tokenizer is that of the run: leave out --tokenizer-type"
        )
    if given.run is not None and given.step is None and given.sample is None:
        flags.error("--run needs --step N or --sample N")
    if given.max_tokens < 0:
        flags.error(f"--max-tokens must be 0 or more, not {given.max_tokens}")


def _show_dataset(given: argparse.Namespace, config: DataConfig) -> int:
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.tokenizer import build_tokenizer
    from megatron_lab.data_tools.dataset_check import length_histogram, verify

    tokenizer = build_tokenizer(config) if config.tokenizer_type else None
    dataset = IndexedDataset(given.prefix)
    if given.document is not None:
        for number in given.document:
            _show_document(dataset, number, tokenizer, given.max_tokens)
        return 0
    print(_sizes(dataset))
    if given.verify:
        return _report_problems(dataset, verify(dataset, tokenizer.vocab_size if tokenizer else _ANY_ID), tokenizer)
    bins = length_histogram(dataset)
    print("\n".join(histogram_lines(bins)))
    if given.histogram is not None:
        draw_histogram(bins, Path(dataset.prefix).name, Path(given.histogram))
        print(f"drawn: {given.histogram}")
    return 0


def _sizes(dataset: IndexedDataset) -> str:
    from megatron.data.indexed_dataset import fingerprint, has_loss_mask, loss_mask_prefix

    tokens = dataset.num_tokens(range(dataset.num_documents))
    masked = f", with a loss mask ({loss_mask_prefix(dataset.prefix)})" if has_loss_mask(dataset.prefix) else ""
    return (
        f"{dataset.prefix}: {dataset.num_documents:,} documents in {len(dataset.lengths):,} sequences, {tokens:,} tokens of "
        f"{dataset.dtype.name}, fingerprint {fingerprint(dataset)}{masked}"
    )


def _show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None, most: int) -> None:
    if not 0 <= number < dataset.num_documents:
        raise ValueError(f"--document {number}: {dataset.prefix} has documents 0 to {dataset.num_documents - 1:,}.")
    from megatron.data.indexed_dataset import has_loss_mask, open_loss_mask
    from megatron.data.samples import LEARNED

    ids = dataset.document(number).tolist()
    print(f"document {number:,}: {len(ids):,} tokens")
    _show_ids(ids, tokenizer, most)
    if has_loss_mask(dataset.prefix):
        learned = (open_loss_mask(dataset).document(number) & LEARNED > 0).tolist()
        print(f"  learned with --data-loss-mask: {sum(learned):,} of {len(ids):,} tokens")
        pairs = zip(ids[: most or None], learned, strict=False)
        for answers, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            if answers:
                of_it = [id for id, _ in run]
                print("    " + (" ".join(map(str, of_it)) if tokenizer is None else repr(tokenizer.decode(of_it))))


def _show_ids(ids: list[int], tokenizer: Tokenizer | None, most: int) -> None:
    shown = ids[: most or None]
    left = f" ... and {len(ids) - len(shown):,} more (--max-tokens)" if len(shown) < len(ids) else ""
    print(f"  ids: {' '.join(map(str, shown))}{left}")
    if tokenizer is not None:
        text = "".join(_text_of(shown, tokenizer))
        print("  text: " + text.replace("\n", "\n        ") + left)


def _text_of(ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text, with a mark where a document ends."""
    start = 0
    for at, id in enumerate([*ids, tokenizer.eod]):
        if id == tokenizer.eod:
            yield tokenizer.decode(ids[start:at])
            if at < len(ids):
                yield f"\n[end of document {id}]\n"
            start = at + 1


def _report_problems(dataset: IndexedDataset, problems: Iterator[DatasetProblem], tokenizer: Tokenizer | None) -> int:
    count = 0
    for count, problem in enumerate(problems, start=1):
        if count <= _SHOWN_PROBLEMS:
            print(problem.text)
    if count > _SHOWN_PROBLEMS:
        print(f"... and {count - _SHOWN_PROBLEMS:,} more")
    ids = (
        f"ids below {tokenizer.vocab_size:,}"
        if tokenizer
        else "ids not negative (give the tokenizer's flags to check against its vocabulary)"
    )
    print(f"{count:,} problems: {dataset.prefix} should be made again" if count else f"sound: sizes, order of the index, {ids}")
    return 1 if count else 0


def histogram_lines(bins: list[LengthBin]) -> list[str]:
    """The lengths of the documents as bars of text."""
    most = max((each.num_documents for each in bins), default=0)
    lines = [f"{'tokens':>25}  {'documents':>14}  {'tokens in them':>18}"]
    for each in bins:
        name = f"{each.low:,}" if each.low == each.high else f"{each.low:,} to {each.high:,}"
        bar = "#" * max(round(_BAR * each.num_documents / most), 1 if each.num_documents else 0) if most else ""
        lines.append(f"{name:>25}  {each.num_documents:>14,}  {each.num_tokens:>18,}  {bar}".rstrip())
    return lines


def draw_histogram(bins: list[LengthBin], name: str, path: Path) -> None:
    """Draw how many documents, and how many tokens, lie in documents of which length.

    Args:
        name: of the dataset, without its folder.

    Raises:
        ValueError: matplotlib is missing, or does not know the kind of file.
    """
    figure = optional("matplotlib.figure", "--histogram needs matplotlib").Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    places = range(len(bins))
    for shift, label, values, colour in (
        (-0.2, "documents", [each.num_documents for each in bins], "#4477aa"),
        (0.2, "tokens", [each.num_tokens for each in bins], "#ccbb44"),
    ):
        total = max(sum(values), 1)
        axes.bar([place + shift for place in places], [100 * value / total for value in values], 0.4, label=label, color=colour)
    ranges = [f"{each.low:,}" + (f" to {each.high:,}" if each.high > each.low else "") for each in bins]
    axes.set_xticks(places, ranges, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("% of all documents, of all tokens")
    documents, tokens = (sum(getattr(each, field) for each in bins) for field in ("num_documents", "num_tokens"))
    axes.set_title(f"{name}: {documents:,} documents, {tokens:,} tokens", loc="left", fontsize=11)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    axes.legend()
    figure.savefig(path)


def _show_run(given: argparse.Namespace) -> int:
    from megatron_lab.data_tools.run_lineage import RunLineage

    lineage = RunLineage.of(Path(given.run), given.ckpt_step)
    numbers = lineage.step_samples(given.step) if given.step is not None else range(given.sample, given.sample + 1)
    if given.step is not None and not given.json:
        print(f"step {given.step:,}: {len(numbers):,} samples, {numbers.start:,} to {numbers.stop - 1:,} ({lineage.origin})")
    for number, pieces, ids in lineage.samples(numbers):
        if given.json:
            print(json.dumps({"sample": number, "pieces": [vars(piece) for piece in pieces]}))
            continue
        print(f"sample {number:,}{' (passed over after a loss spike)' if lineage.passed_over(number) else ''}")
        for piece in pieces:
            print(f"  {_place(piece)}")
        if given.sample is not None:
            _show_ids(ids, lineage.tokenizer, given.max_tokens)
    return 0


def _place(piece: SamplePiece) -> str:
    last = piece.first_token + piece.num_tokens - 1
    tokens = f"tokens {piece.first_token:,} to {last:,}" if piece.num_tokens > 1 else f"token {last:,}"
    return f"{piece.prefix}: document {piece.document:,}, {tokens}"
