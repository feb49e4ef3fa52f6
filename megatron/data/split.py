"""Which documents are for training, validation and test."""

from __future__ import annotations

import itertools

SPLIT_NAMES = ("training", "validation", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of the three splits, summing to 1, from ``--split``; missing entries are 0.

    Raises:
        ValueError: not one to three numbers, a negative one, or none above 0.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or any(share < 0 for share in shares) or not 0 < total < float("inf"):
        raise ValueError(
            f"--split {text!r} must be one to three numbers that are not negative and not all 0 (training, validation, test), "
            "separated by commas.\n  For example: --split 969,30,1"
        )
    first, second, third = (share / total for share in [*shares, 0.0, 0.0][:3])
    return first, second, third


def split_documents(text: str, num_documents: int) -> tuple[range, range, range]:
    """The documents of each split: consecutive ranges whose bounds are rounded fractions of all documents.

    Rounding (halves to even, of a running sum of shares) is Megatron's, so the same file splits at the same documents.
    """
    bounds = [round(share * num_documents) for share in itertools.accumulate(parse_split(text), initial=0.0)]
    train, valid, test = (range(start, stop) for start, stop in itertools.pairwise(bounds))
    return train, valid, test
