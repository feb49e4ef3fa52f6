"""Join indexed datasets into one: their documents in the order given, without rewriting a token. Loss masks beside them are joined
too.

python tools/merge_data.py --input data/part_00000 data/part_00001 --output-prefix data/all
python tools/merge_data.py --input 'data/part_*' --output-prefix data/all
"""

from __future__ import annotations

import argparse
import glob
import sys
from pathlib import Path

from megatron_lab.commands.parser import ToolParser


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = ToolParser(description=__doc__)
    flags.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="datasets (paths without .bin and .idx), folders or patterns; the datasets of a folder or pattern sorted by name",
    )
    flags.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    return flags


def prefixes(words: list[str]) -> list[str]:
    """The datasets that --input names.

    Raises:
        ValueError: a folder or pattern without a dataset, or a dataset named twice.
    """
    from megatron.data.indexed_dataset import loss_mask_prefix

    found: list[str] = []
    for word in words:
        pattern = f"{glob.escape(word)}/*.idx" if Path(word).is_dir() else f"{word}.idx"
        if Path(f"{word}.idx").is_file() or not (Path(word).is_dir() or glob.has_magic(word)):
            found.append(word)  # what is missing is told when it is opened
        elif matched := sorted(path.removesuffix(".idx") for path in glob.glob(pattern, recursive=True)):
            masks = {loss_mask_prefix(prefix) for prefix in matched}
            found += [prefix for prefix in matched if prefix not in masks]
        else:
            raise ValueError(f"--input {word}: there is no dataset (PREFIX.bin and PREFIX.idx).")
    paths = [Path(prefix).resolve() for prefix in found]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"--input names {found[number]} twice.\n  Leave one of them out.")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, or 1 if nothing was written."""
    given = parser().parse_args(arguments)
    from megatron.data.indexed_dataset import has_loss_mask, loss_mask_prefix
    from megatron.data.indexed_writer import join  # numpy only after --help
    from megatron_lab.data_tools.preprocess.storage import told_where_no_room

    try:
        inputs, output = prefixes(given.input), Path(given.output_prefix)
        if not output.parent.is_dir():
            raise ValueError(f"--output-prefix {output}: the folder {output.parent} does not exist.\n  Make it first.")
        if output.resolve() in [Path(prefix).resolve() for prefix in inputs]:
            raise ValueError(f"--output-prefix {output} is one of the inputs.\n  Give another name.")
        masked = [has_loss_mask(prefix) for prefix in inputs]
        if any(masked) and not all(masked):
            raise ValueError(
                f"{inputs[masked.index(True)]} has a loss mask, and {inputs[masked.index(False)]} has none.\n"
                "  Join those with a loss mask apart; in training, --data-path takes both."
            )
        with told_where_no_room(str(output.parent), "Make room there, or write to another disk. Nothing is written."):
            # Masks first: no dataset is there without its own, or with one of an earlier dataset.
            for suffix in (".idx", ".bin"):
                Path(f"{loss_mask_prefix(str(output))}{suffix}").unlink(missing_ok=True)
            if any(masked):
                join([loss_mask_prefix(prefix) for prefix in inputs], loss_mask_prefix(str(output)))
            joined = join(inputs, str(output))
    except (ValueError, OSError) as error:
        print(f"merge_data.py: error: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote {output}.bin and {output}.idx: {joined.num_documents:,} documents in {joined.num_sequences:,} sequences, "
        f"{joined.num_tokens:,} tokens from {len(inputs):,} datasets",
        file=sys.stderr,
    )
    return 0
