"""Diagnosis of a hang: find the rank that keeps the other ranks waiting. The functions only evaluate the flight records of all
ranks, the files with their current activity.

Each rank counts its calls (collectives and messages) on each channel, which is a process group or a pair of ranks. A waiting rank
waits for every rank of the channel whose count is lower than its own: that rank has not entered the call yet. A receive that is
posted in advance is counted too, so a rank may seem to wait for ranks that wait themselves.

The culprit is a rank that others wait for and that waits for no rank. If all ranks wait in a cycle, a rank did not send a message
that it should have sent. Then the rank with the least progress in its schedule lacks this message. The culprit is a rank that it
waits for and that has made more progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lab.flight.record import Channel, Snapshot

_DOWN_TEXT = "the node or the link to it is down or very slow"


@dataclass(frozen=True)
class HangDiagnosis:
    """Which rank causes a hang, and a message for the log."""

    culprit: int | None
    """Rank that causes the hang; None if no single rank can be named."""
    message: str
    """One log line: the rank, its node, the collective or message that it did not enter, and its last activity. If no rank can
    be named, the line describes the hang."""
    waiting: tuple[int, ...]
    """Ranks that wait for the culprit, directly or through other ranks."""


def diagnose_ranks(snapshots: Sequence[Snapshot]) -> HangDiagnosis:
    """Find the rank that keeps all other ranks waiting.

    Args:
        snapshots: current state of each rank, from its flight record (the file into which the rank writes its activity). Ranks
            without a readable record are missing.
    """
    by_rank = {snapshot.rank: snapshot for snapshot in snapshots}
    for state, state_text in (("gone", "is gone"), ("stopped", "was stopped by a signal (SIGSTOP, or a debugger)")):
        if matches := [snapshot for snapshot in snapshots if snapshot.process == state]:
            snapshot = max(matches, key=lambda snapshot: snapshot.quiet_s)
            remaining = tuple(sorted(rank for rank in by_rank if rank != snapshot.rank))
            return HangDiagnosis(
                snapshot.rank,
                f"{_format_rank(snapshot)}: its process {state_text}; last seen {_format_activity(snapshot)}",
                remaining,
            )
    wait_graph = {snapshot.rank: _find_awaited_calls(snapshot, by_rank) if snapshot.waiting else {} for snapshot in snapshots}
    candidates = {peer for edges in wait_graph.values() for peer in edges if not wait_graph[peer]}
    if not candidates and any(wait_graph.values()):
        candidates = {_find_cycle_culprit(wait_graph, by_rank)}
    if not candidates:
        return _diagnose_without_culprit(snapshots)
    dependents = {rank: _find_dependents(rank, wait_graph) for rank in candidates}
    culprit = max(candidates, key=lambda rank: (len(dependents[rank]), by_rank[rank].quiet_s))
    snapshot, waiting = by_rank[culprit], dependents[culprit]
    # In a cycle, the call that the culprit left out is awaited by a rank that the culprit waits for.
    waiting_rank = min(
        (rank for rank, edges in wait_graph.items() if culprit in edges), key=lambda rank: (rank not in wait_graph[culprit], rank)
    )
    missed_call = wait_graph[waiting_rank][culprit]
    state = f"; its process is {snapshot.process}" if snapshot.process else ""
    state_text = (
        f"{_format_rank(snapshot)}: did not enter {missed_call}, for which rank {waiting_rank} waits; "
        f"last seen {_format_activity(snapshot)}{state}"
    )
    if snapshot.waiting and not wait_graph[culprit]:
        state_text += "; all ranks have entered the call that it waits for itself: a message to it is lost, or its device hangs"
    return HangDiagnosis(culprit, state_text, waiting)


def diagnose_silent_node(silent_s: float, silent_snapshots: Sequence[Snapshot], alive: Sequence[Snapshot]) -> HangDiagnosis:
    """Describe a hang in which a node sends no reports: the node or the link to it is the cause.

    Args:
        silent_s: seconds since the node's last report.
        silent_snapshots: state of the node's ranks, from its last report.
        alive: state of the ranks of all nodes that have not ended.
    """
    silent_ranks = sorted(snapshot.rank for snapshot in silent_snapshots)
    node = f"node {silent_snapshots[0].host} ({format_rank_list(silent_ranks)})"
    message = f"{node} has sent no report for {silent_s:.0f} s: {_DOWN_TEXT}"
    return HangDiagnosis(None, message, tuple(sorted(snapshot.rank for snapshot in alive if snapshot.rank not in silent_ranks)))


def diagnose_missing_ranks(num_missing: int, alive: Sequence[Snapshot]) -> HangDiagnosis:
    """Describe a hang in which the nodes have never reported some ranks: these nodes, or the links to them, are the cause.

    Args:
        num_missing: number of ranks that were never reported.
        alive: state of all reported ranks that have not ended.
    """
    message = f"{num_missing} ranks have never sent a report: their nodes, or the links to them, are down"
    return HangDiagnosis(None, message, tuple(sorted(snapshot.rank for snapshot in alive)))


def diagnose_silent_first_node(silent_s: float, address: str, alive: Sequence[Snapshot]) -> HangDiagnosis:
    """Describe a hang in which the first node, whose watcher collects the reports of all nodes, does not answer. Called on another
    node.

    Args:
        silent_s: seconds since the first node's last answer.
        address: address of the first node's watcher.
        alive: state of the ranks of this node that have not ended.
    """
    message = f"the first node ({address}) has not answered for {silent_s:.0f} s: {_DOWN_TEXT}"
    return HangDiagnosis(None, message, tuple(sorted(snapshot.rank for snapshot in alive)))


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks as text: at most eight ranks, then the number of the remaining ranks."""
    text = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _find_cycle_culprit(wait_graph: Mapping[int, Mapping[int, str]], by_rank: Mapping[int, Snapshot]) -> int:
    """Return the rank that causes a cycle of ranks that wait for each other.

    The rank with the least progress lacks a message. The culprit is one of the ranks that it waits for, with more progress. The
    least advanced rank may also wait for its tensor-parallel peers, but they are at the same position of the schedule.

    Args:
        wait_graph: for each waiting rank, the ranks that it waits for. Each awaited rank has a description of the communication
            call that it has not entered.
        by_rank: current state of each rank.
    """

    def get_progress(rank: int) -> tuple[int, int]:
        return by_rank[rank].iteration, by_rank[rank].num_started_ops

    pairs = [
        (get_progress(rank) >= get_progress(peer), get_progress(rank), -by_rank[rank].quiet_s, peer)
        for rank in wait_graph
        for peer in wait_graph[rank]
    ]
    return min(pairs)[-1]


def _find_awaited_calls(snapshot: Snapshot, by_rank: Mapping[int, Snapshot]) -> dict[int, str]:
    """Return the ranks that a waiting rank waits for. Each awaited rank has a description of the communication call that it has not
    entered.

    Args:
        snapshot: state of the waiting rank.
        by_rank: state of all ranks.
    """
    awaited_calls: dict[int, str] = {}
    for channel in snapshot.channels:
        for rank in channel.ranks:
            peer = by_rank.get(rank)
            if peer is None or rank == snapshot.rank:
                continue
            # Both ends of a message count it: the sender when it starts to send, the receiver when it posts the receive.
            peer_channel = next((peer_channel for peer_channel in peer.channels if _is_same_channel(channel, peer_channel)), None)
            if (0 if peer_channel is None else peer_channel.calls) < channel.calls:
                awaited_calls.setdefault(rank, _format_call(channel, 1 if peer_channel is None else peer_channel.calls + 1))
    return awaited_calls


def _is_same_channel(a: Channel, b: Channel) -> bool:
    return (a.group, a.ranks, a.directed) == (b.group, b.ranks, b.directed)


def _format_call(channel: Channel, ordinal: int) -> str:
    if channel.directed:
        return f"message {ordinal} from rank {channel.ranks[0]} to rank {channel.ranks[1]} ({channel.group})"
    return f"call {ordinal} of the group {channel.group} of {len(channel.ranks)} ranks ({channel.last})"


def _find_dependents(rank: int, wait_graph: Mapping[int, Mapping[int, str]]) -> tuple[int, ...]:
    dependents, frontier = set[int](), {rank}
    while frontier:
        frontier = {
            waiting_rank
            for waiting_rank, edges in wait_graph.items()
            if waiting_rank not in dependents and any(dependency in edges for dependency in frontier)
        }
        dependents |= frontier
    return tuple(sorted(dependents - {rank}))


def _diagnose_without_culprit(snapshots: Sequence[Snapshot]) -> HangDiagnosis:
    """Describe a hang in which all waiting ranks have made equally many communication calls. The numbers of calls then cannot show
    which rank is the cause."""
    waiting = tuple(snapshot.rank for snapshot in snapshots if snapshot.waiting)
    busy = [snapshot for snapshot in snapshots if not snapshot.waiting and snapshot.phase != "ended"]
    if not waiting and busy:
        snapshot = max(busy, key=lambda snapshot: snapshot.quiet_s)
        state = f"; its process is {snapshot.process}" if snapshot.process else ""
        if snapshot.process or len(busy) == 1:
            return HangDiagnosis(snapshot.rank, f"{_format_rank(snapshot)}: {_format_activity(snapshot)}{state}", ())
        message = (
            f"no rank waits for a call of another: {len(busy)} ranks compute, or wait for their devices; "
            f"rank {snapshot.rank} longest"
        )
        return HangDiagnosis(None, f"{message}, {_format_activity(snapshot)}", ())
    if len(busy) == 1:
        snapshot = busy[0]
        return HangDiagnosis(snapshot.rank, f"{_format_rank(snapshot)}: {_format_activity(snapshot)}, and all others wait", waiting)
    longest_waiting = max(
        (snapshot for snapshot in snapshots if snapshot.waiting), key=lambda snapshot: snapshot.quiet_s, default=None
    )
    longest_note = (
        "" if longest_waiting is None else f"; rank {longest_waiting.rank} waits longest, {_format_activity(longest_waiting)}"
    )
    hosts = sorted({snapshot.host for snapshot in snapshots if snapshot.waiting})
    link = f", or a link between nodes {', '.join(hosts[:4])} is slow" if len(hosts) > 1 else ""
    return HangDiagnosis(
        None,
        f"no rank is behind: all have entered the same calls, so a message is lost or a device hangs{link}{longest_note}",
        waiting,
    )


def _format_rank(snapshot: Snapshot) -> str:
    return f"rank {snapshot.rank} (node {snapshot.host}, process {snapshot.pid})"


def _format_activity(snapshot: Snapshot) -> str:
    op_text = f", {snapshot.op}" if snapshot.op else ""
    waiting_text = ", waiting" if snapshot.waiting else ""
    return f"{snapshot.phase}{op_text}{waiting_text}, iteration {snapshot.iteration}, {snapshot.quiet_s:.0f} s ago"
