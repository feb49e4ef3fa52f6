r"""Launcher that starts the ranks of a node, and restarts them in place with spare or fewer ranks when a rank is lost.

    python -m megatron_lab.resilience.supervisor --nproc-per-node 8 pretrain_gpt.py FLAGS                      one node
    python -m megatron_lab.resilience.supervisor --nproc-per-node 8 --nnodes 3:4 --meet HOST:PORT \
        pretrain_gpt.py FLAGS                                                                              on each of several
    python -m megatron_lab.resilience.supervisor --serve PORT                                                 a store for --meet

docs/survival.md describes when ranks are restarted. This module contains the work of one node: it forks the ranks, observes how
they end, and follows the state of the job (`JobState` in `job_state.py`). Another process of the node, the envoy
(`envoy.py`), communicates with the other nodes: it reads and changes that state.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing.connection
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.training.signals import EXIT_REFUSED, SAME_KEY_PRESS_S, get_exit_signals
from megatron_lab.resilience.command import parse_command_line
from megatron_lab.resilience.job_state import JobLimits, NodeReport
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
from megatron_lab.resilience.pipes import copy_pipes
from megatron_lab.resilience.ranks import (
    LocalRanks,
    build_environment,
    create_progress_file,
    import_run_modules,
    read_progress,
    select_visible_devices,
    set_process_name,
)
from megatron_lab.resilience.verdict import NodeSlots, build_report, find_failed_rank, has_stopped_rank, is_slot_failure
from megatron_lab.terminal import get_terminal_width, wrap_text

PROGRAM = "supervisor"
_POLL_INTERVAL_S = 0.1
"""Seconds between checks for the first finished step after a restart."""
_SETTLE_TIME_S = 0.3
"""Seconds to wait for the process that really failed, if the ranks that ended so far only lost contact with another rank."""


def log(message: str) -> None:
    """Write a message to stderr. Each line begins with the name of the supervisor program. On a terminal, long lines are wrapped
    between words."""
    with suppress(OSError):
        text = "".join(f"{PROGRAM}: {line}\n" for line in message.splitlines())
        sys.stderr.write(wrap_text(text, get_terminal_width(sys.stderr)))
        sys.stderr.flush()


class Supervisor:
    """Launcher of one node: starts, observes and restarts the node's ranks, from the first start to the end of the job.

    Args:
        args: parsed command line of the supervisor.
        stop_code: exit code of ranks that were asked to stop (--exit-signal-code).
        stop_signals: signals that ask the supervisor to stop the job.
    """

    def __init__(self, args: argparse.Namespace, stop_code: int, stop_signals: tuple[signal.Signals, ...]) -> None:
        from megatron.parallel.rendezvous import find_address_towards
        from megatron_lab.resilience.envoy import start_envoy
        from megatron_lab.resilience.store_server import open_state_store

        self._args, self._stop_code, self._stop_signals = args, stop_code, stop_signals
        self._slots = NodeSlots(args.nproc_per_node)
        self._ranks: LocalRanks | None = None
        self._command: StartCommand | None = None
        self._used_slots: list[int] = []
        self._num_stop_signals, self._stop_requested_at = 0, 0.0
        self._is_stopping = False  # the ranks, or one of them, were asked to stop
        self._should_rejoin = False  # whether to request new ranks when these have ended
        self._failure_seen_at: float | None = None  # start of the current restart; None if no restart is in progress
        self._restart_times: list[str] = []
        self._has_restarted = self._has_loaded = False  # whether the new ranks are forked, and have loaded a checkpoint
        self._progress_fd = create_progress_file()
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        limits = JobLimits(args.nnodes, args.elastic, args.max_restarts, args.last_call_s)
        address = args.local_addr or ("127.0.0.1" if args.meet is None else find_address_towards(*args.meet))
        envoy_config = EnvoyConfig(
            name, address, tuple(args.flags), limits, args.lost_after_s, args.join_timeout_s, bool(args.join_at_once)
        )
        self._signal_read_fd, wakeup_fd = os.pipe()
        self._signal_write_fd = wakeup_fd
        for fd in (self._signal_read_fd, wakeup_fd):
            os.set_blocking(fd, False)
        self._envoy_pid, self._pipe = start_envoy(envoy_config, lambda: open_state_store(args.meet, args.run_id), read_progress)
        self._request_ranks()

    def run(self) -> int:
        """Run until the job has ended, and return its exit code."""
        signal.set_wakeup_fd(self._signal_write_fd, warn_on_full_buffer=False)
        for signum in (*self._stop_signals, signal.SIGCHLD):
            signal.signal(signum, lambda signum, frame: None)
        try:
            while True:
                wait_s = None if self._failure_seen_at is None else _POLL_INTERVAL_S
                ready_fds = multiprocessing.connection.wait([self._pipe.fileno(), self._signal_read_fd], wait_s)
                if self._signal_read_fd in ready_fds:
                    for signum_byte in os.read(self._signal_read_fd, 4096):
                        if signum_byte in self._stop_signals:
                            self._handle_stop_signal(signal.Signals(signum_byte))
                if self._pipe.fileno() in ready_fds:
                    try:
                        message = self._pipe.recv()
                    except (EOFError, OSError):
                        return self._wait_without_envoy()
                    if isinstance(message, JobEnded):
                        return self._finish(message.code, message.reason)
                    if isinstance(message, LogMessage):
                        log(message.text)
                    elif isinstance(message, StartCommand):
                        self._start_ranks(message)
                    elif isinstance(message, EndRanksCommand):
                        self._handle_new_round(message)
                    elif isinstance(message, StopRanksCommand):
                        self._stop_ranks(signal.SIGTERM)
                self._check_ranks()
        finally:
            self._end_ranks()

    def _request_ranks(self, last_end: tuple[int, NodeReport] | None = None) -> None:
        """Ask the envoy (the process that agrees with the other nodes) when to start ranks on this node.

        Args:
            last_end: `JobState.generation` and report of the ranks that have just ended, if any.
        """
        self._ranks, self._command, self._is_stopping, self._should_rejoin = None, None, False, False
        request = RanksRequest(len(self._slots.get_available()))
        self._send(request if last_end is None else RanksEnded(*last_end, next_request=request))

    def _send(self, message: SupervisorMessage) -> None:
        with suppress(BrokenPipeError):  # the envoy has ended: its last message, or the end of the pipe, is read next
            self._pipe.send(message)

    def _start_restart_timer(self) -> None:
        """Start to measure how long the restart of the ranks takes. Called when this node notices that they must restart."""
        self._failure_seen_at, self._restart_times, self._has_restarted = time.monotonic(), [], False

    def _start_ranks(self, command: StartCommand) -> None:
        """Fork the ranks of this node by the plan in the command. The command comes from the envoy (the process that agrees with
        the other nodes)."""
        if self._num_stop_signals:
            self._send(RanksEnded(command.generation, NodeReport("stopped", self._stop_code, "stopped"), next_request=None))
            return
        plan, args = command.plan, self._args
        ranks_per_node = list(plan.counts.values())
        self._used_slots = self._slots.get_available()[: ranks_per_node[command.node_rank]]
        num_restarts = command.generation - 1
        met_at = time.monotonic()
        if command.node_rank == 0:
            for message in plan.notes:
                log(message)
        os.ftruncate(self._progress_fd, 0)
        environments = [
            build_environment(
                local_rank,
                ranks_per_node,
                command.node_rank,
                plan.address,
                plan.port,
                (num_restarts, args.max_restarts),
                args.run_id,
            )
            for local_rank in range(ranks_per_node[command.node_rank])
        ]
        devices = select_visible_devices(self._used_slots, args.nproc_per_node, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if devices is not None:
            environments = [{**environment, "CUDA_VISIBLE_DEVICES": devices} for environment in environments]
        fds = (self._pipe.fileno(), self._signal_read_fd, self._signal_write_fd)
        self._command, self._ranks = command, LocalRanks(args.program, [*args.flags, *plan.flags], environments, fds)
        if self._failure_seen_at is not None:
            self._has_restarted, self._has_loaded = True, False
            self._restart_times += [
                f"met after {met_at - self._failure_seen_at:.2f}",
                f"forked after {time.monotonic() - self._failure_seen_at:.2f}",
            ]

    def _check_ranks(self) -> None:
        """Collect the exit codes of ranks that have ended, and report or handle their end."""
        ranks, command = self._ranks, self._command
        if ranks is None or command is None:
            return
        if self._failure_seen_at is not None and self._has_restarted:
            self._check_first_step(self._failure_seen_at, should_log=command.node_rank == 0)
        if not ranks.poll():
            return
        if not self._is_stopping and has_stopped_rank(ranks.exit_codes, self._stop_code):
            self._stop_ranks(signal.SIGTERM)
        report = build_report(ranks.exit_codes, len(ranks.running_pids), self._stop_code, is_stopping=self._is_stopping)
        if report is None:
            return
        if report.kind == "failed":
            self._handle_failure()
            return
        self._end_ranks()
        self._ranks = None
        if self._should_rejoin:
            self._request_ranks((command.generation, report))
        else:
            self._send(RanksEnded(command.generation, report, next_request=None))

    def _check_first_step(self, failure_seen_at: float, *, should_log: bool) -> None:
        """Measure how long a restart takes until the checkpoint is loaded, and until the first step is finished. Then stop
        measuring.

        Args:
            failure_seen_at: time.monotonic() when the failure was noticed.
            should_log: whether this node logs the times.
        """
        progress, elapsed = read_progress(), time.monotonic() - failure_seen_at
        if progress.start_iteration is not None and not self._has_loaded:
            self._restart_times.append(f"loaded after {elapsed:.2f}")
            self._has_loaded = True
        if progress.has_steps:
            if should_log:
                log(f"back after {elapsed:.1f} s ({', '.join(self._restart_times)}, first step after {elapsed:.2f})")
            self._failure_seen_at = None

    def _handle_failure(self) -> None:
        """End the other ranks of this node after the failure of a rank, log the failure, and request new ranks."""
        ranks, command = self._ranks, self._command
        assert ranks is not None and command is not None
        self._start_restart_timer()
        failed_rank = find_failed_rank(ranks.exit_codes, self._stop_code)
        deadline = time.monotonic() + _SETTLE_TIME_S
        while failed_rank is not None and not is_slot_failure(ranks.exit_codes[failed_rank]) and time.monotonic() < deadline:
            time.sleep(0.01)  # other ranks may notice a lost connection before the system reports that the failed process has ended
            ranks.poll()
            failed_rank = find_failed_rank(ranks.exit_codes, self._stop_code)
        assert failed_rank is not None
        report = build_report(ranks.exit_codes, len(ranks.running_pids), self._stop_code, is_stopping=False)
        assert report is not None
        progress = read_progress()
        rank = sum(list(command.plan.counts.values())[: command.node_rank]) + failed_rank
        message = f"rank {rank} (node {socket.gethostname()}, slot {self._used_slots[failed_rank]}) {report.words}"
        time_text = f" after iteration {progress.last_iteration}" if progress.last_iteration is not None else " before training"
        log(f"{message}{time_text}: the ranks of this node are ended")
        failed_slots = [self._used_slots[failed_rank]] if is_slot_failure(ranks.exit_codes[failed_rank]) else []
        self._end_ranks()
        for slot in self._slots.record_end(progress, failed_slots, command.num_spare_slots):
            log(f"slot {slot} is excluded: its rank failed twice in a row without completing a step")
        self._request_ranks((command.generation, NodeReport(report.kind, report.code, message)))

    def _handle_new_round(self, command: EndRanksCommand) -> None:
        """End the ranks of this node and request new ones, because all ranks of the job are restarted.

        If the command allows it, the ranks first save a checkpoint.
        """
        if self._command is None:
            return  # this node has ended its part in that start already
        if self._ranks is None:
            log(f"{command.reason}: restarting")
            self._start_restart_timer()
            self._request_ranks()
            return
        log(f"{command.reason}: the ranks of this node {'save and end' if command.saves_first else 'are ended'}")
        self._start_restart_timer()
        if command.saves_first:
            self._should_rejoin = True
            self._stop_ranks(signal.SIGTERM)
            return
        self._end_ranks()
        self._slots.record_end(read_progress(), (), 0)
        self._request_ranks()

    def _count_stop_signal(self) -> bool:
        """Count a request to stop. Return False if the signal belongs to the last request: one Ctrl-C comes from the terminal, and
        again from a launch script that passes it on."""
        now = time.monotonic()
        if self._num_stop_signals and now - self._stop_requested_at < SAME_KEY_PRESS_S:
            return False
        self._num_stop_signals, self._stop_requested_at = self._num_stop_signals + 1, now
        return True

    def _handle_stop_signal(self, signum: signal.Signals) -> None:
        if not self._count_stop_signal():
            return
        if self._num_stop_signals == 1:
            stops_job = not self._args.leave_on_signal
            effect = "the job is asked to save and stop" if stops_job else "the job saves and continues without this node"
            log(f"{signum.name}: {effect}; a second signal ends {'the job' if stops_job else 'the ranks of this node'} at once")
            self._send(StopRequest(self._stop_code) if stops_job else LeaveRequest())
            self._stop_ranks(signum)
        elif self._ranks is not None:
            log(f"{signum.name} again: the ranks of this node are killed, without waiting for the step or the save")
            self._ranks.send_signal(signal.SIGKILL)

    def _stop_ranks(self, signum: signal.Signals) -> None:
        if self._ranks is not None and not self._is_stopping:
            self._is_stopping = True
            self._ranks.send_signal(signum)

    def _end_ranks(self) -> None:
        if self._ranks is None:
            return
        for local_rank in self._ranks.kill():
            log(f"the rank in slot {self._used_slots[local_rank]} was killed but does not end: its device or storage blocks it")
            self._slots.exclude(self._used_slots[local_rank])
        if self._failure_seen_at is not None:
            self._restart_times.append(f"others ended after {time.monotonic() - self._failure_seen_at:.2f}")

    def _finish(self, code: int, reason: str) -> int:
        self._end_ranks()
        os.waitpid(self._envoy_pid, 0)
        if code and not (self._num_stop_signals and code == self._stop_code):
            log(f"{reason} (exit code {code})")
        return code

    def _wait_without_envoy(self) -> int:
        """Wait for the ranks to end, without restarting them, and return the exit code.

        Used after the process that communicates with the other nodes (envoy) has left the job or died, for example for lack of
        memory.
        """
        is_leaving = bool(self._args.leave_on_signal and self._num_stop_signals)
        if not is_leaving:
            log("the process that communicates with the other nodes has died. Running ranks continue, but will not be restarted")
        while self._ranks is not None:
            ready_fds = multiprocessing.connection.wait([self._signal_read_fd])
            for signum in os.read(self._signal_read_fd, 4096) if ready_fds else b"":
                if signum in self._stop_signals and self._count_stop_signal():
                    self._stop_ranks(signal.SIGTERM)
                    if self._num_stop_signals > 1:
                        self._ranks.send_signal(signal.SIGKILL)
            self._ranks.poll()
            report = build_report(
                self._ranks.exit_codes, len(self._ranks.running_pids), self._stop_code, is_stopping=self._is_stopping
            )
            if report is not None:
                return self._stop_code if is_leaving else report.code
        return self._stop_code if is_leaving else 1


_CUDA_USED_MESSAGE = (
    "a module of --imports calls CUDA while it is imported, perhaps only torch.cuda.is_available(). The ranks are forks of the "
    "process that imports it, and CUDA does not work in such forks. Call CUDA only in functions of the module, or use torchrun."
)


def can_resume(program: str, config: Config, world_size: int) -> bool:
    """Return whether the settings fit the checkpoint from which the run would resume. If not, print the reason.

    Also return False if a module of --imports has called CUDA, because CUDA does not work in forked ranks then. A forked process
    makes the check: storage and tokenizer libraries may start threads, which must not exist in this process when ranks are forked.
    """
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 0
        with suppress(BaseException):  # the ranks report other errors better
            from megatron_lab.monitoring.forks import has_lost_devices
            from megatron_lab.resilience.resume_check import find_resume_problem

            has_lost_cuda = config.parallel.device != "cpu" and has_lost_devices()
            problem = _CUDA_USED_MESSAGE if has_lost_cuda else find_resume_problem(config, world_size)
            if problem is not None:
                code = EXIT_REFUSED
                sys.stderr.write(f"{os.path.basename(program)}: {problem}\n")
                sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != EXIT_REFUSED


def main(argv: Sequence[str]) -> int:
    """Run the supervisor, the launcher that restarts ranks.

    Returns:
        the exit code of the job: 0 if the job finished, the code of the ranks if they were asked to stop, and 2 for invalid
            settings. Otherwise it is the code of the first failure since the ranks last started from a newer checkpoint.
    """
    args = parse_command_line(argv)
    args.flags = copy_pipes(args.flags)
    if args.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # like torchrun; must be set before torch is imported
    if args.serve is not None:
        from megatron_lab.resilience.store_server import serve_until_signal

        return serve_until_signal(args.serve)
    try:
        min_ranks, max_ranks = args.elastic
        # If fewer ranks suffice, the envoy chooses the layout for the available ranks later.
        config = parse(args.flags) if min_ranks < max_ranks else load(args.flags, max_ranks).config
    except ConfigError as error:
        sys.stderr.write(f"{os.path.basename(args.program)}: {error}\n")
        return EXIT_REFUSED
    if config.checkpoint.load is None:
        log("--load is not set: restarted ranks begin the run from the start")
    set_process_name("supervisor")
    import_run_modules()
    if not can_resume(args.program, config, args.elastic[1]):
        return EXIT_REFUSED
    gc.collect()
    gc.freeze()  # forks share these objects' memory, because garbage collection does not write to them
    return Supervisor(args, config.training.exit_signal_code, get_exit_signals(config.training.exit_signal)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
