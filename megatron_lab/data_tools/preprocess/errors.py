"""Errors for invalid records and damaged files of the input of preprocessing."""

from __future__ import annotations


class BadRecordError(ValueError):
    """Raised for an input record that cannot be converted to tokens. The message says why."""


class UndecodableRecordError(BadRecordError):
    """Raised for an input record with bytes that are not valid in the encoding of its file."""


class DamagedFileError(ValueError):
    """Raised for an input file that cannot be read to its end.

    The error stops the job, because nobody knows how many records are lost. With --on-error skip-files, the job skips the rest of
    the file and continues.
    """
