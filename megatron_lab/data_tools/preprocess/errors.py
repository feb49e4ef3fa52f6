"""What can be wrong with texts that are read."""

from __future__ import annotations


class BadRecordError(ValueError):
    """A record that cannot be used."""


class DamagedFileError(ValueError):
    """A file that cannot be read to its end. It stops the job, since nobody knows how much is missing, unless such files may be
    passed over."""
