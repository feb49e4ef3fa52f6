"""Errors of input records and input files."""

from __future__ import annotations


class BadRecordError(ValueError):
    """Raised for an input record that cannot be converted to tokens. The message says why."""


class DamagedFileError(ValueError):
    """Raised for an input file that cannot be read to its end.

    The error stops the job, because the number of lost records is unknown. A job that skips damaged files continues.
    """
