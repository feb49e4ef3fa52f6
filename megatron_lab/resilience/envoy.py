"""Rendezvous process of a node (envoy), forked by the node's launcher (supervisor).

The envoy reads and changes the state of the job, sends heartbeats, and watches the heartbeats of other nodes. On the first node it
also plans on which nodes the ranks start next. The supervisor itself forks the ranks, so it must have no threads, must not
initialize CUDA, and should never wait for a store or a dry run. The envoy does all this in its place.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from megatron.config.cli import load
from megatron.config.errors import ConfigError
from megatron.config.launcher import PROGRAM
from megatron.training.signals import EXIT_REFUSED
from megatron_lab.resilience import layouts
from megatron_lab.resilience.job_state import JobState, NodeOffer, RankProgress, StartPlan
from megatron_lab.resilience.messages import (
    EndRanksCommand,
    EnvoyConfig,
    JobEnded,
    LeaveRequest,
    LogMessage,
    RanksEnded,
    RanksRequest,
    StartCommand,
    StopRanksCommand,
    StopRequest,
    SupervisorMessage,
)
from megatron_lab.resilience.ranks import exit_with_parent, reset_signal_handlers, set_process_name
from megatron_lab.resilience.state_store import StateStore, StoreUnavailableError, update_state

_POLL_INTERVAL_S = 0.2
_LOG_DELAY_S, _LOG_INTERVAL_S = 10.0, 60.0
_STORE_LOST_MESSAGE = (
    "the store in which the nodes meet does not answer ({}). Running ranks continue, but no rank can be restarted until a store "
    "answers at the same address (--serve)"
)


class Envoy:
    """Rendezvous process of a node, which agrees with the other nodes on when and where ranks start. It tells the node's launcher
    (supervisor) what to do.

    Args:
        store: store that holds the state of the job and the heartbeats of the nodes.
        pipe: connection to the supervisor.
        read_progress: returns how far the ranks of this node have trained.
    """

    def __init__(self, config: EnvoyConfig, store: StateStore, pipe: Connection, read_progress: Callable[[], RankProgress]) -> None:
        self._config, self._store, self._pipe, self._read_progress = config, store, pipe, read_progress
        self._pending_messages: list[SupervisorMessage] = []
        self._last_generation = 0
        """Generation of the last start in which this node has ranks."""
        self._has_started = self._has_ranks = self._has_joined = self._has_sent_stop = False
        self._last_request: RanksRequest | None = None
        self._last_heartbeats: dict[str, tuple[int, float]] = {}
        self._ready_nodes: tuple[str, ...] = ()
        self._nodes_without_layout: tuple[str, ...] | None = None
        self._ready_changed_at = self._waiting_since = time.monotonic()
        self._next_log_at = self._waiting_since + _LOG_DELAY_S

    def run(self) -> None:
        """Follow the state of the job until it has ended or this node has left it."""
        store_lost_at = None
        while True:
            if self._pipe.poll(_POLL_INTERVAL_S if not self._pending_messages or store_lost_at is not None else 0):
                self._pending_messages.append(self._pipe.recv())
                continue
            try:
                if self._poll_state():
                    return
                if store_lost_at is not None:
                    self._pipe.send(LogMessage("the store in which the nodes meet answers again"))
                store_lost_at = None
            except StoreUnavailableError as error:
                if store_lost_at is None:
                    store_lost_at = time.monotonic()
                    self._pipe.send(LogMessage(_STORE_LOST_MESSAGE.format(error)))
                if not self._has_ranks and time.monotonic() > store_lost_at + self._config.join_timeout_s:
                    self._pipe.send(JobEnded(1, "the store in which the nodes meet did not answer again"))
                    return

    def _poll_state(self) -> bool:
        """Apply the messages of the supervisor (the launcher on this node) to the stored state of the job, read the state once, and
        act on it.

        Returns:
            whether the job has ended or this node has left it.
        """
        node = self._config.name
        state = self._store.read()
        while self._pending_messages:
            message = self._pending_messages[0]
            state = update_state(self._store, self._build_transition(message))
            if isinstance(message, RanksRequest) and node not in state.members:
                break  # an earlier job with this run id is just ending; try again later
            self._pending_messages.pop(0)
            if isinstance(message, LeaveRequest):
                return True
            if isinstance(message, RanksEnded) and message.next_request is not None:
                self._pending_messages.insert(0, message.next_request)
            if isinstance(message, RanksRequest):
                self._has_started, self._last_request = False, message
                if not self._has_joined:
                    self._store.start_heartbeat(node)
                    self._has_joined = True
        for lost_node in self._find_lost_nodes(state):
            state = self._remove_lost_node(lost_node)
        if not self._has_joined:
            return False
        if state.phase == "over":
            self._remove_lost_node(node)
            self._pipe.send(JobEnded(state.code, state.words))
            return True
        if node not in state.members:
            if self._has_started:
                self._end_ranks("the other nodes consider this node lost", saves_first=False)
            elif self._last_request is not None:
                self._pending_messages.append(self._last_request)
        elif state.phase == "gathering":
            if self._has_started:
                self._end_ranks(state.why, saves_first=state.gentle)
            self._handle_gathering(state)
        else:
            self._handle_running(state)
        return False

    def _build_transition(self, message: SupervisorMessage) -> Callable[[JobState], JobState]:
        node, limits = self._config.name, self._config.limits
        if isinstance(message, LeaveRequest):
            return lambda state: state.remove_leaving_node(node)
        if isinstance(message, StopRequest):
            return lambda state: state.request_stop(message.code)
        if isinstance(message, RanksEnded):
            self._has_ranks = False
            return lambda state: state.add_report(node, message.generation, message.report, self._read_progress(), limits)
        offer = NodeOffer(message.num_slots, self._config.address)
        return lambda state: state.add_node(node, offer, limits, requests_restart=self._config.joins_at_once)

    def _remove_lost_node(self, name: str) -> JobState:
        return update_state(self._store, lambda state: state.remove_lost_node(name, self._read_progress(), self._config.limits))

    def _end_ranks(self, reason: str, *, saves_first: bool) -> None:
        self._has_started = self._has_ranks = False
        self._pipe.send(EndRanksCommand(reason, saves_first))

    def _handle_running(self, state: JobState) -> None:
        """Act on a job that is training. If the ranks of this node are not started yet, start them. If a node has requested the job
        to stop, stop them."""
        node = self._config.name
        if state.generation != self._last_generation:
            if self._has_started:
                self._end_ranks(state.why, saves_first=False)
            elif node in state.order and state.plan is not None:
                self._last_generation, self._has_started, self._has_ranks, self._has_sent_stop = state.generation, True, True, False
                num_slots = sum(offer.places for offer in state.members.values())
                num_spare_slots = max(0, num_slots - self._config.limits.ranks[0])
                self._pipe.send(StartCommand(state.generation, state.order.index(node), state.plan, num_spare_slots, state.why))
        if state.told and self._has_ranks and not self._has_sent_stop:
            self._has_sent_stop = True
            self._pipe.send(StopRanksCommand())
        self._waiting_since = time.monotonic()
        self._next_log_at = self._waiting_since + _LOG_DELAY_S

    def _handle_gathering(self, state: JobState) -> None:
        """Act on a job that waits for nodes.

        If this is the first node and enough nodes are ready, plan the layout and start the ranks. If the ranks cannot start, end
        the job. Log from time to time how many nodes are missing.
        """
        limits, current_time = self._config.limits, time.monotonic()
        if state.ready != self._ready_nodes:
            self._ready_nodes, self._ready_changed_at, self._nodes_without_layout = state.ready, current_time, None
        nodes = state.order_nodes(limits.nodes[1])
        if nodes[:1] == (self._config.name,) and self._nodes_without_layout is None:
            if state.can_start(limits, current_time - self._ready_changed_at):
                self._start_ranks(state, nodes)
                return
            if len(state.ready) == len(state.members) >= limits.nodes[1]:
                self._nodes_without_layout = state.ready
        if self._nodes_without_layout is not None and len(nodes) >= limits.nodes[1]:
            update_state(
                self._store,
                lambda state: state.end_job(state.code or 1, f"no layout of the job fits the remaining slots ({state.why})"),
            )
        elif current_time > self._waiting_since + self._config.join_timeout_s:
            reason = f"not enough nodes joined within {self._config.join_timeout_s:.0f} s (--join-timeout-s)"
            update_state(self._store, lambda state: state.end_job(state.code or 1, reason))
        elif current_time > self._next_log_at:
            self._next_log_at = current_time + _LOG_INTERVAL_S
            num_slots = sum(state.members[name].places for name in state.ready)
            min_nodes, max_nodes = limits.nodes
            self._pipe.send(
                LogMessage(
                    f"waiting for nodes: {len(state.ready)} with {num_slots} slots have joined; the job needs {min_nodes}"
                    f"{f' to {max_nodes}' if max_nodes > min_nodes else ''} nodes and at least {limits.ranks[0]} slots"
                )
            )

    def _start_ranks(self, state: JobState, nodes: Sequence[str]) -> None:
        slots_per_node = {name: state.members[name].places for name in nodes}
        try:
            start_plan = plan_start(self._config, state, slots_per_node)
        except ConfigError as error:
            reason = f"{PROGRAM}: {error}"
            update_state(self._store, lambda state: state.end_job(EXIT_REFUSED, reason))
            return
        if start_plan is None:
            self._nodes_without_layout = state.ready
        elif self._store.compare_and_swap(state, state.start_ranks(*start_plan)):
            self._handle_running(state.start_ranks(*start_plan))

    def _find_lost_nodes(self, state: JobState) -> list[str]:
        """Return the names of the nodes whose heartbeats have stopped. The first node watches all other nodes, and every other node
        watches the first."""
        watched = [name for name in state.members if name != self._config.name]
        if next(iter(state.members), None) != self._config.name:
            watched = watched[:1]
        current_time, lost_nodes = time.monotonic(), []
        for name in watched:
            heartbeats = self._store.get_heartbeats(name)
            last_heartbeats, changed_at = self._last_heartbeats.get(name, (-1, current_time))
            if heartbeats != last_heartbeats:
                self._last_heartbeats[name] = heartbeats, current_time
            elif current_time > changed_at + self._config.node_timeout_s:
                lost_nodes.append(name)
        self._last_heartbeats = {name: self._last_heartbeats[name] for name in watched if name not in lost_nodes}
        return lost_nodes


def plan_start(envoy_config: EnvoyConfig, state: JobState, slots_per_node: Mapping[str, int]) -> tuple[StartPlan, int] | None:
    """Plan the next start of the ranks: the layout for the available slots (a slot runs one rank), and the flags that the layout
    needs.

    Args:
        envoy_config: limits of the job and the user's flags.
        state: state of the job, with the global batch size that the layout must keep.
        slots_per_node: number of slots of each node, in the order of the nodes.

    Returns:
        the plan and the global batch size of the job; None if no layout fits the slots.

    Raises:
        ConfigError: the settings are invalid for this number of ranks, or for every number.
    """
    argv, max_ranks = envoy_config.argv, envoy_config.limits.ranks[1]
    config = layouts.parse_with_batch_size(argv, state.batch)
    if state.generation == 0 and sum(slots_per_node.values()) >= max_ranks:
        load(argv, max_ranks)
    layout = layouts.find_nearest_layout(config, slots_per_node, max_ranks, layouts.check_memory)
    if layout is None:
        if state.generation == 0:
            load(argv, min(max_ranks, sum(slots_per_node.values())))
        return None
    new_config = layout.change.apply(config, layout.world_size)[0]
    global_batch_size = state.batch or layouts.get_global_batch_size(new_config, layout.world_size)
    flags = layouts.format_extra_flags(layout, argv, global_batch_size)
    if (
        config.checkpoint.save is not None
        and state.plan is not None
        and next(iter(state.plan.counts)) != next(iter(slots_per_node))
    ):
        flags.append("--take-over")  # the lost first node cannot release its claim on the save folder
    messages = layouts.format_layout_messages(layout, config, max_ranks)
    return StartPlan(
        layout.ranks_per_node, tuple(flags), envoy_config.address, find_free_port(), tuple(messages)
    ), global_batch_size


def find_free_port() -> int:
    """Return a port on which no process listens. It is below the range from which the system takes ports of outgoing
    connections."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def start_envoy(
    config: EnvoyConfig, open_store: Callable[[], StateStore], read_progress: Callable[[], RankProgress]
) -> tuple[int, Connection]:
    """Fork the rendezvous process of this node (`Envoy`).

    Args:
        config: name and address of this node, and the limits of the job.
        open_store: opens the store that holds the state of the job.
        read_progress: returns how far the ranks of this node have trained.

    Returns:
        the process id, and the caller's end of the pipe to the process.
    """
    supervisor_end, envoy_end = Pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        envoy_end.close()
        return pid, supervisor_end
    try:
        supervisor_end.close()
        os.setsid()  # what stops the supervisor is not for the envoy
        exit_with_parent(parent_pid, signal.SIGKILL)
        reset_signal_handlers()
        set_process_name("envoy")
        Envoy(config, open_store(), envoy_end, read_progress).run()
    except EOFError:  # the supervisor has ended
        pass
    except BaseException:  # noqa: BLE001 - never return into the supervisor
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
