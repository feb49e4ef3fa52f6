"""What can be wrong with an input or with where the output goes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class BadRecordError(ValueError):
    """A record that cannot be used."""


class BadShardError(ValueError):
    """The first bad record of a shard, where bad ones stop the job.

    Args:
        piece: Which piece of the shard it is in.
        record: Number of the record in the piece, from 0.
        reason: What is wrong with it.
    """

    def __init__(self, piece: int, record: int, reason: str) -> None:
        super().__init__(piece, record, reason)
        self.piece, self.record, self.reason = piece, record, reason


class DamagedFileError(ValueError):
    """A file that cannot be read to its end; it stops the job, since nobody knows how much is missing."""


class NoDocumentError(ValueError):
    """The whole input gives a dataset without a document; there is nothing to go on with."""


_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the file is larger than the system lets it be",
}


@contextmanager
def told_where_no_room(folder: str, remedy: str) -> Iterator[None]:
    """Say in which folder there is no room, and what to do about it.

    Raises:
        ValueError: instead of an OSError that says that nothing more can be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ValueError(f"{folder}: {_NO_ROOM[error.errno]} ({error}).\n  {remedy}") from error
