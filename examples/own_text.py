"""Inspect a user's text for quickstart.sh: its size, and a suitable vocabulary and document length.

Print four values for the script: a vocabulary size, a larger size to try if training the vocabulary fails, the maximum number of
characters of a document, and a digest of the files. The script stores the digest: if its next call gets an equal digest, it reuses
the vocabulary and the dataset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.data_tools.input_flags import add_encoding_flags, get_text_encoding
from megatron_lab.data_tools.preprocess.input_shards import find_sources
from megatron_lab.data_tools.preprocess.text_encoding import TextEncoding

MIN_BYTES = 20_000
"""Minimum bytes of text. With less, the validation split (a hundredth) is shorter than one sequence of the model."""
_VOCAB_SIZES = ((2_000_000, 4096), (500_000, 2048), (100_000, 1024), (0, 512))
"""Pairs (minimum bytes of text, size of the vocabulary that so much text can train), largest first."""


def describe_text(path: str, column: str, text_encoding: TextEncoding) -> tuple[str, str]:
    """Measure a text, and choose a vocabulary size and a document length that suit its size.

    Args:
        path: file or folder with the text.
        column: name of the column or key that holds the text.
        text_encoding: encoding of the files and treatment of invalid bytes, for the digest.

    Returns:
        Lines for the user (size of the text, number of files by format), and the four values that quickstart.sh needs, separated by
        spaces: vocabulary size, a larger size to try if that fails, maximum characters of a document, and digest of the files.

    Raises:
        ValueError: the text does not exist or is shorter than `MIN_BYTES`.
    """
    sources, notes = find_sources([path])
    num_bytes = sum(source.num_bytes for source in sources)
    if num_bytes < MIN_BYTES:
        raise ValueError(
            f"{path} has {num_bytes:,} bytes of text; a model needs at least {MIN_BYTES:,} to learn from. Choose a longer text."
        )
    num_by_type = Counter(source.file_format for source in sources)
    counts = ", ".join(f"{count:,} of {source_type}" for source_type, count in sorted(num_by_type.items()))
    lines = [f"{num_bytes / 1e6:,.2f} MB in {counts}", *notes]
    vocab_size = next(vocab_size for min_bytes, vocab_size in _VOCAB_SIZES if num_bytes >= min_bytes)
    max_document_chars = min(max(num_bytes // 100, 500), 50_000)
    settings = [column, text_encoding.name, text_encoding.errors]
    digest_input = json.dumps([*settings, *((source.path, source.version) for source in sources)])
    digest = xxhash.xxh3_128_hexdigest(digest_input.encode())
    return "\n".join(lines), f"{vocab_size} {4 * vocab_size} {max_document_chars} {digest}"


def main(argv: list[str] | None = None) -> int:
    """Inspect the text that the command line names; print notes to stderr and the four values to stdout. Returns the exit status:
    0, or 2 for an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("text", metavar="FILE|FOLDER", help="what tools/preprocess_data.py --input takes")
    parser.add_argument("--column", default="text", metavar="NAME", help="column or key of the text (text)")
    add_encoding_flags(parser)
    args = parser.parse_args(argv)
    try:
        description, script_values = describe_text(args.text, args.column, get_text_encoding(args))
    except (ValueError, OSError) as error:
        print(f"quickstart.sh: {str(error).replace('--input ', '--text ')}", file=sys.stderr)
        return 2
    print(description, file=sys.stderr)
    print(script_values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
