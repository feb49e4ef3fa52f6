"""Launcher for one node: `python pretrain_gpt.py --nproc 8 FLAGS` starts the ranks, and ends with the reason if one fails.

The ranks are forks of this process (`LocalRanks`), which serves the store through which they meet. The launcher does not restart
ranks; `supervisor.py` does. docs/launching.md describes it for users. Does not import torch when it is imported.
"""

from __future__ import annotations

import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.launcher import ERROR_FILE_VARIABLE, PROGRAM, ErrorReport, read_error_file
from megatron.training.signals import EXIT_INTERRUPTED, EXIT_REFUSED, GRACE_S, SAME_KEY_PRESS_S, get_exit_signals
from megatron_lab.resilience.job_state import NodeReport
from megatron_lab.resilience.launcher_flags import check_devices, count_ranks, create_log_folder, parse_launcher_flags, refuse
from megatron_lab.resilience.pipes import copy_pipes
from megatron_lab.resilience.rank_output import LogFileInUseError, RankOutput, get_log_file
from megatron_lab.resilience.ranks import (
    LocalRanks,
    build_environment,
    create_progress_file,
    import_run_modules,
    read_progress,
    set_process_name,
)
from megatron_lab.resilience.verdict import (
    build_report,
    describe_exit,
    find_failed_rank,
    has_stopped_rank,
    is_slot_failure,
    to_exit_status,
)

_REPORT_TIME_S = 2.0
"""Seconds in which the other ranks may end by themselves after a rank has failed. Then they get SIGTERM."""
_TERMINATION_TIME_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the other ranks after a rank has failed."""
_DRAIN_TIME_S = 2.0
"""Seconds in which the terminal must accept the last output after a signal. Without a signal, there is no limit."""
_MAX_LAST_LINES = 12
"""Maximum number of lines of stderr to show of a failed rank that has written no message."""
EXIT_NOTICE_S, EXIT_TIMEOUT_S = 30.0, 300.0
"""Seconds after the end of the first rank, if it ended without an error: until the launcher names the ranks that still run, and
until it ends them."""
_FAILED_CODE = 1


def launch_ranks(program: str, argv: Sequence[str]) -> list[str]:
    """Run the ranks of one node, and exit with the exit code of the run.

    Args:
        program: path of the script that every rank runs.
        argv: command line with the flags of the launcher (--nproc, --log-dir).

    Returns:
        the flags without those of the launcher, if they ask for a plan. A plan needs no ranks, so this process has to make it, with
            the number of ranks in its environment.

    Raises:
        SystemExit: in all other cases. The code is 2 for invalid flags or settings, and that of the failed rank after a failure.
    """
    args = parse_launcher_flags(copy_pipes(argv))
    num_ranks = count_ranks(args)
    if {"--dry-run", "--plan"}.intersection(args.flags):
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}
        return args.flags
    if num_ranks > 1:
        _limit_threads()
    try:
        config = load(args.flags, num_ranks).config
    except ConfigError as error:
        refuse(str(error))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt while Python forks would be ignored
    set_process_name("launcher")
    import_run_modules()
    check_devices(num_ranks, config)
    from megatron_lab.resilience.supervisor import can_resume

    if not can_resume(program, config, num_ranks):
        sys.exit(EXIT_REFUSED)
    gc.collect()
    gc.freeze()  # forks share these objects' memory, because garbage collection does not write to them
    log_folder = create_log_folder(args.log_dir, config)
    try:
        launcher = NodeLauncher(program, args.flags, config, num_ranks, log_folder)
    except LogFileInUseError:
        refuse(f"--log-dir {log_folder}: another run writes its log files there. Give each run a folder of its own.")
    except OSError as error:
        refuse(f"--nproc {num_ranks}: the ranks cannot be started, because the system refuses more processes or files ({error}).")
    sys.exit(launcher.run())


class NodeLauncher:
    """Launcher of the ranks of one node, from their start to their end.

    Args:
        program: path of the script that every rank runs.
        flags: flags of the script.
        config: settings that the flags stand for.
        num_ranks: number of ranks.
        log_folder: folder for the log files of the ranks.
    """

    def __init__(self, program: str, flags: Sequence[str], config: Config, num_ranks: int, log_folder: Path) -> None:
        self._config = config
        self._stop_code = config.training.exit_signal_code
        self._exit_signals = get_exit_signals(config.training.exit_signal)
        self._passed_signals: set[int] = set()
        self._interrupted_at: float | None = None
        self._is_stopping = self._is_interrupted_twice = False
        self._first_end_at: float | None = None  # time at which the first rank ended without an error
        self._has_exit_notice = False  # whether the ranks that still ran some time later were named
        self._output = RankOutput(log_folder, num_ranks)
        self._error_folder = Path(tempfile.mkdtemp(prefix="megatron-errors-"))
        self._signal_read_fd, signal_write_fd = os.pipe()
        for fd in (self._signal_read_fd, signal_write_fd):
            os.set_blocking(fd, False)
        self._handle_signals(signal_write_fd)
        num_threads = os.environ.get("OMP_NUM_THREADS")
        threads = "" if num_threads is None else f" with OMP_NUM_THREADS={num_threads}"
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        self._print(f"{ranks} on this node{threads}, logs: {get_log_file(log_folder, 0)}")
        try:
            self._start_ranks(program, flags, num_ranks, signal_write_fd)
        except OSError:
            shutil.rmtree(self._error_folder, ignore_errors=True)
            raise
        self._selector = selectors.PollSelector()  # it accepts all files, unlike epoll
        for fd in (self._signal_read_fd, *self._output.read_fds):
            self._selector.register(fd, selectors.EVENT_READ)

    def run(self) -> int:
        """Wait until the ranks have ended, print the reason if they failed, and return the exit code."""
        try:
            code = self._wait_for_end()
        finally:
            shutil.rmtree(self._error_folder, ignore_errors=True)
        self._drain_output()
        return code

    def _drain_output(self) -> None:
        """Wait until the terminal or pipe has accepted the last output. A signal limits the time."""
        deadline: float | None = None
        while self._output.blocked_fds:
            if deadline is None and self._passed_signals:
                deadline = time.monotonic() + _DRAIN_TIME_S
            timeout_s = None if deadline is None else deadline - time.monotonic()
            if timeout_s is not None and timeout_s <= 0:
                return
            self._wait(timeout_s)

    def _wait_for_end(self) -> int:
        report = None
        while report is None:
            self._wait(self._get_exit_wait_s())
            if self._is_interrupted_twice:
                return self._end_at_once()
            if self._has_exit_timed_out():
                return self._end_hanging_ranks()
            report = self._check_ranks()
        failed_rank = self._find_failed_rank()
        self._output.is_muted = failed_rank is not None
        if self._ranks.running_pids:
            report = self._end_other_ranks(report)
            failed_rank = self._find_failed_rank()
        self._output.read_all()
        if failed_rank is not None:
            self._print_failure(failed_rank, report)
        else:
            self._output.show_all_lines()
            if report.kind == "stopped" and not self._read_errors():
                self._print(f"{self._describe_signals()} before training: there is nothing to save")
        return self._choose_exit_code(failed_rank, report)

    def _handle_signals(self, signal_write_fd: int) -> None:
        """Write the numbers of signals to a pipe, in this process. A SIGHUP that `nohup` ignores stays ignored."""
        signal.set_wakeup_fd(signal_write_fd, warn_on_full_buffer=False)
        for signum in (*self._exit_signals, signal.SIGCHLD, signal.SIGWINCH):
            if signal.getsignal(signum) != signal.SIG_IGN or signum != signal.SIGHUP:
                signal.signal(signum, lambda signum, frame: None)

    def _start_ranks(self, program: str, flags: Sequence[str], num_ranks: int, signal_write_fd: int) -> None:
        """Fork the ranks, and serve the store through which they meet.

        The port of the store is bound before the fork, so no other process can take it. The store itself is created after the fork,
        because it has a thread.
        """
        import torch.distributed as dist

        create_progress_file()
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * num_ranks))
        host, port = listener.getsockname()
        environments = []
        for local_rank in range(num_ranks):
            error_file = self._get_error_file(local_rank)
            error_file.parent.mkdir(parents=True)
            environment = build_environment(local_rank, [num_ranks], 0, host, port, (0, 0), f"node-{os.getpid()}-{port}")
            environments.append({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True", ERROR_FILE_VARIABLE: str(error_file)})
        rank_fds = [fd for fds in self._output.rank_streams for fd in fds]
        own_fds = [*self._output.own_fds, self._signal_read_fd, signal_write_fd, listener.fileno()]
        self._ranks = LocalRanks(program, flags, environments, [*own_fds, *rank_fds], self._output.rank_streams)
        self._output.close_rank_streams()
        self._store = dist.TCPStore(host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def _get_error_file(self, local_rank: int) -> Path:
        return self._error_folder / str(local_rank) / "error.json"

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for a signal, output or the time limit, whichever comes first. Then handle signals and output."""
        waits = [wait for wait in (timeout_s, self._output.get_wait_s()) if wait is not None]
        blocked_fds = self._output.blocked_fds
        for fd in blocked_fds:
            self._selector.register(fd, selectors.EVENT_WRITE)
        ready_fds = [key.fd for key, _ in self._selector.select(min(waits, default=None))]
        for fd in blocked_fds:
            self._selector.unregister(fd)
        for fd in ready_fds:
            if fd in blocked_fds:
                self._output.write_waiting()
            elif fd == self._signal_read_fd:
                for signum in os.read(fd, 4096):
                    self._handle_signal(signum)
            elif self._output.read(fd) is None:
                self._selector.unregister(fd)
        self._output.show_due_lines()

    def _handle_signal(self, signum: int) -> None:
        if signum == signal.SIGWINCH:
            self._output.copy_terminal_size()
        if signum not in self._exit_signals:
            return
        if signum == signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = now if self._interrupted_at is None else self._interrupted_at
            self._is_interrupted_twice |= now - self._interrupted_at > SAME_KEY_PRESS_S
        if signum not in self._passed_signals:
            self._pass_signal(signum)

    def _pass_signal(self, signum: int) -> None:
        """Ask all ranks to save and end."""
        self._passed_signals.add(signum)
        self._is_stopping = True
        self._output.delay_s = 0.0  # the ranks say what they do next
        self._ranks.send_signal(signum)

    def _check_ranks(self) -> NodeReport | None:
        """Return how the ranks have ended, or None if the launcher must wait for more of them to end."""
        ranks = self._ranks
        if not ranks.poll():
            return None
        if not self._is_stopping and has_stopped_rank(ranks.exit_codes, self._stop_code):
            self._pass_signal(signal.SIGTERM)
        report = self._build_report(is_stopping=self._is_stopping)
        if report is None and (failed_rank := self._find_failed_rank()) is not None:
            reason = f"rank {failed_rank} {describe_exit(ranks.exit_codes[failed_rank])} while the run was about to exit"
            self._print(f"{reason}; the other ranks have {GRACE_S:.0f} s to end")
            self._wait_for_ranks(GRACE_S)  # they probably cannot save without the failed rank
            report = self._build_report(is_stopping=not ranks.running_pids)
        if report is None and self._first_end_at is None:
            self._first_end_at = time.monotonic()
        return report

    def _find_failed_rank(self) -> int | None:
        """Return the local rank that failed first; None if no rank failed, except because of the signals that this launcher has
        passed on."""
        stop_codes = (EXIT_INTERRUPTED, *(-signum for signum in self._passed_signals)) if self._is_stopping else ()
        exit_codes = {rank: code for rank, code in self._ranks.exit_codes.items() if code not in stop_codes}
        failed_rank = find_failed_rank(exit_codes, self._stop_code)
        if failed_rank is not None and self._is_stopping and not is_slot_failure(exit_codes[failed_rank]):
            return None  # ranks that end before training lose contact with each other
        return failed_rank

    def _choose_exit_code(self, failed_rank: int | None, report: NodeReport) -> int:
        if failed_rank is not None and report.kind != "refused":
            return to_exit_status(self._ranks.exit_codes[failed_rank])
        is_stopped_in_training = has_stopped_rank(self._ranks.exit_codes, self._stop_code)
        if self._interrupted_at is not None and report.kind == "stopped" and not is_stopped_in_training:
            return EXIT_INTERRUPTED
        return report.code

    def _get_exit_wait_s(self) -> float | None:
        """Return the seconds until the launcher must act on ranks that do not end, although another rank has ended without an
        error. None if no rank has ended."""
        if self._first_end_at is None:
            return None
        return max(0.0, self._first_end_at + (EXIT_TIMEOUT_S if self._has_exit_notice else EXIT_NOTICE_S) - time.monotonic())

    def _has_exit_timed_out(self) -> bool:
        """Return whether the ranks that still run must be ended. Some time before, print their names."""
        if self._get_exit_wait_s() != 0:
            return False
        if self._has_exit_notice:
            return True
        self._has_exit_notice = True
        remaining_s = EXIT_TIMEOUT_S - EXIT_NOTICE_S
        self._print(f"waiting for {self._describe_running_ranks()} to end, for at most {remaining_s:.0f} s more")
        return False

    def _describe_running_ranks(self) -> str:
        ranks = sorted(self._ranks.running_pids)
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

    def _build_report(self, *, is_stopping: bool) -> NodeReport | None:
        return build_report(self._ranks.exit_codes, len(self._ranks.running_pids), self._stop_code, is_stopping=is_stopping)

    def _wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, or until the time limit."""
        deadline = time.monotonic() + timeout_s
        while self._ranks.running_pids and not self._is_interrupted_twice and (wait_s := deadline - time.monotonic()) > 0:
            self._wait(wait_s)
            self._ranks.poll()

    def _end_at_once(self) -> int:
        """Kill the ranks after a second Ctrl-C. Return the exit code."""
        self._kill_ranks()
        self._output.show_all_lines()
        self._print("second Ctrl-C: the ranks were ended at once, without waiting for the step or the save")
        return EXIT_INTERRUPTED

    def _end_hanging_ranks(self) -> int:
        """End the ranks that still run long after the first rank has ended without an error. Return the exit code."""
        names, hanging_rank = self._describe_running_ranks(), min(self._ranks.running_pids)
        exit_codes = dict(self._ranks.exit_codes)
        self._terminate_ranks()
        self._output.show_all_lines()
        self._print(
            f"the launcher has ended {names}, which did not end within {EXIT_TIMEOUT_S:.0f} s after the first rank had ended. "
            "Complete checkpoints are valid."
        )
        self._print_log_file(hanging_rank)
        return next((code for code in exit_codes.values() if code), _FAILED_CODE)

    def _end_other_ranks(self, report: NodeReport) -> NodeReport:
        """End the ranks that still run after the failure of a rank. Return the final report."""
        self._wait_for_ranks(_REPORT_TIME_S)  # the rank that really failed may end after a rank that lost contact with it
        report = self._build_report(is_stopping=False) or report
        exit_codes = dict(self._ranks.exit_codes)
        self._terminate_ranks()
        self._ranks.exit_codes = exit_codes  # those of the terminated ranks mean nothing
        return report

    def _terminate_ranks(self) -> None:
        """End the running ranks: by SIGTERM, and if this has no effect by SIGKILL."""
        if self._ranks.running_pids:
            self._ranks.send_signal(signal.SIGTERM)
            self._wait_for_ranks(_TERMINATION_TIME_S)
        self._kill_ranks()

    def _kill_ranks(self) -> None:
        for local_rank in self._ranks.kill():
            self._print(f"rank {local_rank} was killed but does not end: its device or storage blocks it")
        self._output.read_all()

    def _print_failure(self, failed_rank: int, report: NodeReport) -> None:
        """Print why the run failed, what to do, and the path of the log file of the rank that failed."""
        exit_codes = self._ranks.exit_codes
        if report.kind == "refused":
            failed_rank = next(rank for rank, code in exit_codes.items() if code == report.code)
        rank, error = find_cause(failed_rank, exit_codes, self._read_errors())
        last_lines = self._output.take_last_lines(rank, _MAX_LAST_LINES)
        if error is None and last_lines:
            self._output.print_message("\n".join(last_lines))
        if error is not None and not self._output.has_shown(error.message):
            self._output.print_message(f"error: {error.message}")
        iteration = read_progress().last_iteration
        when = f" after iteration {iteration}" if iteration is not None else "" if report.kind == "refused" else " before training"
        sentences = [f"rank {rank} {describe_exit(exit_codes[rank])}{when}."]
        if exit_codes[rank] == -signal.SIGKILL:
            sentences.append("If nobody killed it, the memory of this node is exhausted: `dmesg` shows the kills of the system.")
        if report.kind != "refused":
            sentences += self._describe_resume()
        self._print(" ".join(sentences))
        self._print_log_file(rank)

    def _read_errors(self) -> dict[int, ErrorReport]:
        """Read the error files of the ranks that have ended. Return their contents by local rank."""
        errors = {rank: read_error_file(self._get_error_file(rank)) for rank in sorted(self._ranks.exit_codes)}
        return {rank: error for rank, error in errors.items() if error is not None}

    def _describe_resume(self) -> list[str]:
        checkpoint = self._config.checkpoint
        if checkpoint.save is None:
            return []
        command = "The same command" if checkpoint.load == checkpoint.save else f"--load {checkpoint.save}"
        return [f"{command} continues from the newest checkpoint, if there is one."]

    def _describe_signals(self) -> str:
        return " and ".join(signal.Signals(signum).name for signum in sorted(self._passed_signals))

    def _print_log_file(self, local_rank: int) -> None:
        self._output.print_message(f"Log of rank {local_rank}: {get_log_file(self._output.folder, local_rank)}")

    def _print(self, message: str) -> None:
        self._output.print_message(f"{PROGRAM}: {message}")


def find_cause(
    failed_rank: int, exit_codes: Mapping[int, int], errors: Mapping[int, ErrorReport]
) -> tuple[int, ErrorReport | None]:
    """Find the message that explains why a run failed.

    If several ranks fail with the same exit code, a single message may describe the failure of all these ranks.

    Args:
        failed_rank: local rank that failed first, by the exit codes.
        exit_codes: exit codes by local rank; negative for a signal.
        errors: contents of the error files of the ranks that have written one, by local rank.

    Returns:
        the local rank whose log file explains the failure, and its error; None if the rank has written no error file.
    """
    code = exit_codes[failed_rank]
    if code < 0:  # the messages of the rank are older than the signal that ended it
        return failed_rank, None
    causes = (rank for rank, error in sorted(errors.items()) if not error.is_consequence and exit_codes[rank] == code)
    cause = failed_rank if failed_rank in errors and not errors[failed_rank].is_consequence else next(causes, failed_rank)
    return cause, errors.get(cause)


def _limit_threads() -> None:
    """Limit each rank to one thread for CPU operations unless OMP_NUM_THREADS is set, as torchrun does for several ranks."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # which has already read the variable
        import torch

        torch.set_num_threads(1)
