"""Which rank keeps the others waiting. Pure: from what the records of all ranks show.

A waiting rank waits for those whose count of calls is behind its own on a channel that they share: they have not entered the call.
What it has merely posted in advance counts as well, which may add ranks that themselves wait. So the culprit is at the end: it is
waited for, and waits for nobody. Where a message was left out all wait in a circle: then the rank that has come the least far in
its schedule lacks something, and the culprit is one that it waits for, which has gone on without sending it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lab.flight.record import Channel, Snapshot

_DOWN = "it, or the link to it, is down or very slow"


@dataclass(frozen=True)
class Departure:
    """Who keeps the others waiting."""

    culprit: int | None
    """The rank; None where no rank is behind."""
    words: str
    """One line: the rank, its node, what it did not do, what it did last."""
    waiting: tuple[int, ...]
    """Ranks that wait for it, directly or for others that do."""


def find_departed(snapshots: Sequence[Snapshot]) -> Departure:
    """Find the rank that all wait for.

    Args:
        snapshots: of all ranks whose records can be read.
    """
    by_rank = {one.rank: one for one in snapshots}
    for state, words in (("gone", "is gone"), ("stopped", "was stopped by a signal (SIGSTOP, or a debugger)")):
        if found := [one for one in snapshots if one.process == state]:
            one = max(found, key=lambda one: one.quiet_s)
            others = tuple(sorted(rank for rank in by_rank if rank != one.rank))
            return Departure(one.rank, f"{_who(one)}: its process {words}; last seen {_doing(one)}", others)
    behind = {one.rank: _waits_for(one, by_rank) if one.waiting else {} for one in snapshots}
    candidates = {other for edges in behind.values() for other in edges if not behind[other]}
    if not candidates and any(behind.values()):
        candidates = {_who_went_on(behind, by_rank)}
    if not candidates:
        return _nobody(snapshots)
    dependents = {rank: _who_waits(rank, behind) for rank in candidates}
    culprit = max(candidates, key=lambda rank: (len(dependents[rank]), by_rank[rank].quiet_s))
    one, told = by_rank[culprit], dependents[culprit]
    # In a circle the call that the culprit left out is one that a rank waits for which it waits for itself.
    first = min((rank for rank, edges in behind.items() if culprit in edges), key=lambda rank: (rank not in behind[culprit], rank))
    missed = behind[first][culprit]
    state = f"; its process is {one.process}" if one.process else ""
    words = f"{_who(one)}: did not enter {missed}, for which rank {first} waits; last seen {_doing(one)}{state}"
    if one.waiting and not behind[culprit]:
        words += "; what it waits for itself all have entered: a message to it is lost, or its device hangs"
    return Departure(culprit, words, told)


def node_not_heard(silent_s: float, ranks: Sequence[Snapshot], living: Sequence[Snapshot]) -> Departure:
    """What keeps the ranks waiting is a node of which nothing is heard, or the link to it.

    Args:
        silent_s: seconds since it was heard.
        ranks: its ranks as they were then.
        living: the ranks of all nodes.
    """
    there = sorted(one.rank for one in ranks)
    words = f"node {ranks[0].host} ({listed(there)}) has not been heard from for {silent_s:.0f} s: {_DOWN}"
    return Departure(None, words, tuple(sorted(one.rank for one in living if one.rank not in there)))


def never_heard(missing: int, living: Sequence[Snapshot]) -> Departure:
    """Nothing moves, and of some ranks nothing was ever heard.

    Args:
        missing: how many these are.
        living: all others.
    """
    words = f"{missing} ranks have never been heard from: their nodes, or the links to them, are down"
    return Departure(None, words, tuple(sorted(one.rank for one in living)))


def head_not_heard(silent_s: float, address: str, living: Sequence[Snapshot]) -> Departure:
    """The same as another node sees it that does not hear the first one.

    Args:
        address: of the first node's watcher.
        living: the ranks of the node that sees it.
    """
    words = f"the first node has not been heard from at {address} for {silent_s:.0f} s: {_DOWN}"
    return Departure(None, words, tuple(sorted(one.rank for one in living)))


def listed(ranks: Sequence[int]) -> str:
    """Ranks in words, eight of them at the most."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _who_went_on(behind: Mapping[int, Mapping[int, str]], by_rank: Mapping[int, Snapshot]) -> int:
    """The rank of a circle that the one which is the least far waits for and that is further itself. (Tensor ranks of the least far
    wait for it too, at the same place.)"""

    def come(rank: int) -> tuple[int, int]:
        return by_rank[rank].iteration, by_rank[rank].place

    pairs = [(come(rank) >= come(other), come(rank), -by_rank[rank].quiet_s, other) for rank in behind for other in behind[rank]]
    return min(pairs)[-1]


def _waits_for(one: Snapshot, by_rank: Mapping[int, Snapshot]) -> dict[int, str]:
    """Ranks that have not entered what a rank has, each with the call in words."""
    found: dict[int, str] = {}
    for mine in one.channels:
        for rank in mine.ranks:
            other = by_rank.get(rank)
            if other is None or rank == one.rank:
                continue
            # A receive is posted, and a send begun, by either end.
            its = next((its for its in other.channels if _same(mine, its)), None)
            if (0 if its is None else its.calls) < mine.calls:
                found.setdefault(rank, _call(mine, 1 if its is None else its.calls + 1))
    return found


def _same(one: Channel, other: Channel) -> bool:
    return (one.group, one.ranks, one.directed) == (other.group, other.ranks, other.directed)


def _call(channel: Channel, number: int) -> str:
    if channel.directed:
        return f"message {number} from rank {channel.ranks[0]} to rank {channel.ranks[1]} ({channel.group})"
    return f"call {number} of the group {channel.group} of {len(channel.ranks)} ranks ({channel.last})"


def _who_waits(rank: int, behind: Mapping[int, Mapping[int, str]]) -> tuple[int, ...]:
    found, new = set[int](), {rank}
    while new:
        new = {one for one, edges in behind.items() if one not in found and any(other in edges for other in new)}
        found |= new
    return tuple(sorted(found - {rank}))


def _nobody(snapshots: Sequence[Snapshot]) -> Departure:
    """No waiting rank has a rank behind it."""
    waiting = tuple(one.rank for one in snapshots if one.waiting)
    busy = [one for one in snapshots if not one.waiting and one.phase != "ended"]
    if not waiting and busy:
        one = max(busy, key=lambda one: one.quiet_s)
        state = f"; its process is {one.process}" if one.process else ""
        if one.process or len(busy) == 1:
            return Departure(one.rank, f"{_who(one)}: {_doing(one)}{state}", ())
        words = (
            f"no rank waits for a call of another: {len(busy)} ranks compute, or wait for their devices; rank {one.rank} longest"
        )
        return Departure(None, f"{words}, {_doing(one)}", ())
    if len(busy) == 1:
        one = busy[0]
        return Departure(one.rank, f"{_who(one)}: {_doing(one)}, and all others wait", waiting)
    longest = max((one for one in snapshots if one.waiting), key=lambda one: one.quiet_s, default=None)
    at = "" if longest is None else f"; rank {longest.rank} waits longest, {_doing(longest)}"
    hosts = sorted({one.host for one in snapshots if one.waiting})
    link = f", or a link between nodes {', '.join(hosts[:4])} is slow" if len(hosts) > 1 else ""
    return Departure(
        None, f"no rank is behind: all have entered the same calls, so a message is lost or a device hangs{link}{at}", waiting
    )


def _who(one: Snapshot) -> str:
    return f"rank {one.rank} (node {one.host}, process {one.pid})"


def _doing(one: Snapshot) -> str:
    operation = f", {one.operation}" if one.operation else ""
    waits = ", waiting" if one.waiting else ""
    return f"{one.phase}{operation}{waits}, iteration {one.iteration}, {one.quiet_s:.0f} s ago"
