"""Look at a user's own text for quickstart.sh: how much there is, and what vocabulary and documents suit it.

Prints four words for the script: the sizes of vocabulary to try, the characters of a document above which it is cut, and a digest
of the files, by which the next call knows them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron_lab.data_tools.preprocess.input_shards import find_sources

LEAST_BYTES = 20_000
"""With less, a hundredth of the text is shorter than what the model reads at once."""
_VOCABULARIES = ((2_000_000, 4096), (500_000, 2048), (100_000, 1024), (0, 512))
"""Bytes of text from which on a vocabulary of a size has enough to learn from."""


def describe(text: str, column: str) -> tuple[str, str]:
    """What to tell the user, and the words for the script.

    Raises:
        ValueError: there is no such text, or too little.
    """
    sources, notes = find_sources([text])
    num_bytes = sum(source.num_bytes for source in sources)
    if num_bytes < LEAST_BYTES:
        raise ValueError(f"{text} has {num_bytes:,} bytes of text; a model needs at least {LEAST_BYTES:,} to learn anything from.")
    kinds = Counter(source.kind for source in sources)
    told = [f"{num_bytes / 1e6:,.2f} MB in {', '.join(f'{number:,} of {kind}' for kind, number in sorted(kinds.items()))}", *notes]
    size = next(size for least, size in _VOCABULARIES if num_bytes >= least)
    most = min(max(num_bytes // 100, 500), 50_000)
    files = json.dumps([column, *((source.path, source.version) for source in sources)])
    return "\n".join(told), f"{size} {4 * size} {most} {xxhash.xxh3_128_hexdigest(files.encode())}"


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("text", metavar="FILE|FOLDER", help="what tools/preprocess_data.py --input takes")
    flags.add_argument("--column", default="text", metavar="NAME", help="column or key of the text (text)")
    given = flags.parse_args(arguments)
    try:
        told, words = describe(given.text, given.column)
    except (ValueError, OSError) as error:
        print(f"quickstart.sh: {str(error).replace('--input ', '--text ')}", file=sys.stderr)
        return 2
    print(told, file=sys.stderr)
    print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
