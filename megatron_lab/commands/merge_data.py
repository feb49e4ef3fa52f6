"""Concatenate indexed datasets: all documents in the order of the inputs, with unchanged tokens. Their loss masks, if they have
any, and the fingerprint of their tokenizer are kept. Datasets of different tokenizers are refused.

    python tools/merge_data.py --input data/part_00000 data/part_00001 --output-prefix data/all
    python tools/merge_data.py --input 'data/part_*' --output-prefix data/all
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from pathlib import Path

from megatron_lab.commands.parser import ToolParser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = ToolParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="Concatenate these datasets (paths without .bin and .idx), folders or patterns; the datasets of a folder or "
        "pattern are sorted by name.",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="Write PREFIX.bin and PREFIX.idx.")
    return parser


def resolve_prefixes(inputs: list[str]) -> list[str]:
    """Return the datasets that the values of --input name, as paths without .bin and .idx.

    Args:
        inputs: paths of datasets, folders with datasets, or patterns such as `data/part_*`.

    Raises:
        ValueError: a folder or pattern contains no dataset, or a dataset is named twice.
    """
    from megatron.data.indexed_dataset import get_loss_mask_prefix

    prefixes: list[str] = []
    for name in inputs:
        pattern = f"{glob.escape(name)}/*.idx" if Path(name).is_dir() else f"{name}.idx"
        if Path(f"{name}.idx").is_file() or not (Path(name).is_dir() or glob.has_magic(name)):
            prefixes.append(name)  # opening it reports a missing file
        elif matched := sorted(path.removesuffix(".idx") for path in glob.glob(pattern, recursive=True)):
            masks = {get_loss_mask_prefix(prefix) for prefix in matched}
            prefixes += [prefix for prefix in matched if prefix not in masks]
        else:
            raise ValueError(f"--input {name}: there is no dataset (PREFIX.bin and PREFIX.idx) with this prefix. Check the path.")
    paths = [os.path.realpath(prefix) for prefix in prefixes]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ValueError(f"--input names {prefixes[i]} twice.\n  Leave one of them out.")
    return prefixes


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status: 0, or 1 if nothing was written."""
    args = build_parser().parse_args(arguments)
    from megatron.data.indexed_dataset import get_loss_mask_prefix, has_loss_mask
    from megatron.data.indexed_writer import join_datasets  # imports numpy, which --help does not need
    from megatron_lab.data_tools.preprocess.storage import explain_disk_full
    from megatron_lab.tokenizers.fingerprint import merge_fingerprints, write_dataset_fingerprint

    try:
        inputs, output = resolve_prefixes(args.input), Path(args.output_prefix)
        if not output.parent.is_dir():
            raise ValueError(f"--output-prefix {output}: the folder {output.parent} does not exist.\n  Make it first.")
        if os.path.realpath(output) in map(os.path.realpath, inputs):
            raise ValueError(f"--output-prefix {output} is one of the inputs.\n  Give another name.")
        masked = [has_loss_mask(prefix) for prefix in inputs]
        if any(masked) and not all(masked):
            raise ValueError(
                f"{inputs[masked.index(True)]} has a loss mask, and {inputs[masked.index(False)]} has none.\n"
                "  Merge the datasets with a loss mask separately; --data-path of training accepts both."
            )
        fingerprint, message = merge_fingerprints(inputs)
        with explain_disk_full(str(output.parent), "Make room there, or write to another disk. Nothing is written."):
            # Write the masks first: the dataset never exists without its mask, or with the mask of an earlier dataset.
            for suffix in (".idx", ".bin"):
                Path(f"{get_loss_mask_prefix(str(output))}{suffix}").unlink(missing_ok=True)
            if any(masked):
                join_datasets([get_loss_mask_prefix(prefix) for prefix in inputs], get_loss_mask_prefix(str(output)))
            totals = join_datasets(inputs, str(output))
            if fingerprint is not None:
                write_dataset_fingerprint(str(output), fingerprint)
    except (ValueError, OSError) as error:
        print(f"merge_data.py: error: {error}", file=sys.stderr)
        return 1
    if message is not None:
        print(f"note: {message}", file=sys.stderr)
    print(
        f"wrote {output}.bin and {output}.idx: {totals.num_documents:,} documents in {totals.num_sequences:,} sequences, "
        f"{totals.num_tokens:,} tokens from {len(inputs):,} datasets",
        file=sys.stderr,
    )
    return 0
