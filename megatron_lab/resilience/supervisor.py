"""Starts the ranks of a node, and starts them again in place when one is lost: with a spare, or with fewer ranks.

    python -m megatron_lab.resilience.supervisor --nproc-per-node 8 pretrain_gpt.py FLAGS                      one node
    python -m megatron_lab.resilience.supervisor --nproc-per-node 8 --nnodes 3:4 --meet HOST:PORT \\
        pretrain_gpt.py FLAGS                                                                              on each of several
    python -m megatron_lab.resilience.supervisor --serve PORT                                                 the store, on any host

docs/survival.md says what happens when. This file is what one node does: it forks ranks, sees how they end, and does what the roll
of the job (`roll.py`) says, which its envoy (`envoy.py`) reads and changes.
"""

from __future__ import annotations

import argparse
import gc
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.training.signals import LIFE_FILE, REFUSED, read_life
from megatron_lab.resilience.command import settings
from megatron_lab.resilience.messages import Ended, Enter, EnvoyOrders, Halt, Leave, Over, Say, Start, Stop, StopRanks, Wish
from megatron_lab.resilience.ranks import HEARD, LocalRanks, environment, import_what_runs_need, name_process, visible_devices
from megatron_lab.resilience.roll import JobLimits, Life, NodeReport
from megatron_lab.resilience.verdict import NodePlaces, blamed, is_of_its_place, judge, stops

PROGRAM = "supervisor"
_LOOKS_EVERY_S = 0.1
"""While a start has not finished its first step."""
_SETTLES_S = 0.3
"""Where ranks only lost contact with another: time in which that one may be seen to have ended."""


def say(text: str) -> None:
    """A line for the log, on stderr."""
    with suppress(OSError):
        sys.stderr.write("".join(f"{PROGRAM}: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()


class Supervisor:
    """One node's ranks, from the first start to the end of the job."""

    def __init__(self, own: argparse.Namespace, stop_code: int) -> None:
        from megatron.parallel.meeting import address_towards
        from megatron_lab.resilience.envoy import start_envoy
        from megatron_lab.resilience.point import make_book

        self._own, self._stop_code = own, stop_code
        self._places = NodePlaces(own.nproc_per_node)
        self._ranks: LocalRanks | None = None
        self._start: Start | None = None
        self._taken: list[int] = []
        self._stops = 0
        self._stopping = False  # ranks end because they were asked to, or one of them was
        self._rejoins = False  # once they have ended
        self._noticed_at: float | None = None  # when the failure was seen from which this node comes back
        self._told: list[str] = []
        self._comes_back = self._loaded = False  # the next start has begun, and has a state
        # All forks have the file, and it goes with the last of them.
        self._life_file, name = tempfile.mkstemp(prefix="life-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.unlink(name)
        os.environ[LIFE_FILE] = f"/dev/fd/{self._life_file}"
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        limits = JobLimits(own.nnodes, own.elastic, own.max_restarts, own.last_call_s)
        address = own.local_addr or ("127.0.0.1" if own.meet is None else address_towards(*own.meet))
        orders = EnvoyOrders(name, address, tuple(own.flags), limits, own.lost_after_s, own.join_timeout_s, bool(own.join_at_once))
        self._hears, tells = os.pipe()
        self._tells = tells
        for end in (self._hears, tells):
            os.set_blocking(end, False)
        self._envoy, self._pipe = start_envoy(orders, lambda: make_book(own.meet, own.run_id), self._life)
        self._enter()

    def run(self) -> int:
        """Until the job is over; returns its exit code."""
        signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        for number in (*HEARD, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        try:
            while True:
                wait_s = None if self._noticed_at is None else _LOOKS_EVERY_S
                heard, _, _ = select.select([self._pipe.fileno(), self._hears], [], [], wait_s)
                if self._hears in heard:
                    for told in os.read(self._hears, 4096):
                        if told in HEARD:
                            self._asked_to_stop(signal.Signals(told))
                if self._pipe.fileno() in heard:
                    try:
                        message = self._pipe.recv()
                    except (EOFError, OSError):
                        return self._without_envoy()
                    if isinstance(message, Over):
                        return self._over(message.code, message.words)
                    if isinstance(message, Say):
                        say(message.text)
                    elif isinstance(message, Start):
                        self._begin(message)
                    elif isinstance(message, Halt):
                        self._halted(message)
                    elif isinstance(message, StopRanks):
                        self._stop_ranks(signal.SIGTERM)
                self._look()
        finally:
            self._end_ranks()

    def _life(self) -> Life:
        found = read_life(os.environ[LIFE_FILE])
        return Life() if found is None else Life(*found)

    def _enter(self, after: tuple[int, NodeReport] | None = None) -> None:
        """Ask for ranks.

        Args:
            after: the start whose ranks have ended just now, and how.
        """
        self._ranks, self._start, self._stopping, self._rejoins = None, None, False, False
        wish = Enter(len(self._places.available()))
        self._tell(wish if after is None else Ended(*after, enters=wish))

    def _tell(self, wish: Wish) -> None:
        with suppress(BrokenPipeError):  # the envoy has gone: what it said last comes first, or the end of the pipe
            self._pipe.send(wish)

    def _notice(self) -> None:
        """Ranks must be started again: measure how long that takes."""
        self._noticed_at, self._told, self._comes_back = time.monotonic(), [], False

    def _begin(self, start: Start) -> None:
        """Start this node's ranks."""
        if self._stops:
            self._tell(Ended(start.generation, NodeReport("stopped", self._stop_code, "stopped"), enters=None))
            return
        plan, own = start.plan, self._own
        counts = list(plan.counts.values())
        self._taken = self._places.available()[: counts[start.node]]
        restarts = start.generation - 1
        met_at = time.monotonic()
        if start.node == 0:
            for note in plan.notes:
                say(note)
        os.ftruncate(self._life_file, 0)
        variables = [
            environment(local, counts, start.node, plan.address, plan.port, (restarts, own.max_restarts), own.run_id)
            for local in range(counts[start.node])
        ]
        devices = visible_devices(self._taken, own.nproc_per_node, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if devices is not None:
            variables = [{**each, "CUDA_VISIBLE_DEVICES": devices} for each in variables]
        files = (self._pipe.fileno(), self._hears, self._tells)
        self._start, self._ranks = start, LocalRanks(own.program, [*own.flags, *plan.flags], variables, files)
        if self._noticed_at is not None:
            self._comes_back, self._loaded = True, False
            self._told += [f"met after {met_at - self._noticed_at:.2f}", f"forked after {time.monotonic() - self._noticed_at:.2f}"]

    def _look(self) -> None:
        """See which ranks have ended, and what follows."""
        ranks, start = self._ranks, self._start
        if ranks is None or start is None:
            return
        if self._noticed_at is not None and self._comes_back:
            self._looks_for_steps(self._noticed_at, tells=start.node == 0)
        if not ranks.look():
            return
        if not self._stopping and stops(ranks.ended, self._stop_code):
            self._stop_ranks(signal.SIGTERM)
        report = judge(ranks.ended, len(ranks.running), self._stop_code, stopping=self._stopping)
        if report is None:
            return
        if report.kind == "failed":
            self._failed()
            return
        self._end_ranks()
        self._ranks = None
        if self._rejoins:
            self._enter((start.generation, report))
        else:
            self._tell(Ended(start.generation, report, enters=None))

    def _looks_for_steps(self, noticed_at: float, *, tells: bool) -> None:
        """After a restart: measure how long it took, until the first step is finished."""
        life, took = self._life(), time.monotonic() - noticed_at
        if life.began is not None and not self._loaded:
            self._told.append(f"loaded after {took:.2f}")
            self._loaded = True
        if life.has_steps:
            if tells:
                say(f"back after {took:.1f} s ({', '.join(self._told)}, first step after {took:.2f})")
            self._noticed_at = None

    def _failed(self) -> None:
        """A rank has failed: end the others, tell it, and enter again."""
        ranks, start = self._ranks, self._start
        assert ranks is not None and start is not None
        self._notice()
        first = blamed(ranks.ended, self._stop_code)
        until = time.monotonic() + _SETTLES_S
        while first is not None and not is_of_its_place(ranks.ended[first]) and time.monotonic() < until:
            time.sleep(0.01)  # what others notice at once, the system tells of a process that has ended a little later
            ranks.look()
            first = blamed(ranks.ended, self._stop_code)
        assert first is not None
        report = judge(ranks.ended, len(ranks.running), self._stop_code, stopping=False)
        assert report is not None
        life = self._life()
        number = sum(list(start.plan.counts.values())[: start.node]) + first
        words = f"rank {number} (node {socket.gethostname()}, place {self._taken[first]}) {report.words}"
        at = f" after iteration {life.finished}" if life.finished is not None else " before training"
        say(f"{words}{at}: the ranks of this node are ended")
        failed = [self._taken[first]] if is_of_its_place(ranks.ended[first]) else []
        self._end_ranks()
        for place in self._places.ended(life, failed, start.may_lose):
            say(f"place {place} is left out: its rank failed twice without a step between")
        self._enter((start.generation, NodeReport(report.kind, report.code, words)))

    def _halted(self, order: Halt) -> None:
        """The next round is open."""
        if self._start is None:
            return  # it has left that start already
        if self._ranks is None:
            say(f"{order.why}: starting again")
            self._notice()
            self._enter()
            return
        say(f"{order.why}: the ranks of this node {'save and end' if order.gentle else 'are ended'}")
        self._notice()
        if order.gentle:
            self._rejoins = True
            self._stop_ranks(signal.SIGTERM)
            return
        self._end_ranks()
        self._places.ended(self._life(), (), 0)
        self._enter()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._stops += 1
        if self._stops == 1:
            whole = not self._own.leave_on_signal
            what = "the job is asked to save and stop" if whole else "the job saves and goes on without this node"
            say(f"{number.name}: {what}; a second signal ends {'it' if whole else 'its ranks here'} at once")
            self._tell(Stop(self._stop_code) if whole else Leave())
            self._stop_ranks(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
        elif self._ranks is not None:
            self._ranks.tell(signal.SIGKILL)

    def _stop_ranks(self, number: signal.Signals) -> None:
        if self._ranks is not None and not self._stopping:
            self._stopping = True
            self._ranks.tell(number)

    def _end_ranks(self) -> None:
        if self._ranks is None:
            return
        for local in self._ranks.kill():
            say(f"the rank at place {self._taken[local]} does not end though it is killed: its device or storage holds it")
            self._places.leave_out(self._taken[local])
        if self._noticed_at is not None:
            self._told.append(f"others ended after {time.monotonic() - self._noticed_at:.2f}")

    def _over(self, code: int, words: str) -> int:
        self._end_ranks()
        os.waitpid(self._envoy, 0)
        if code and not (self._stops and code == self._stop_code):
            say(f"{words} (exit code {code})")
        return code

    def _without_envoy(self) -> int:
        """The envoy has left the job, or has died, as of a lack of memory: ranks go on to their end, and are not started again."""
        leaves = bool(self._own.leave_on_signal and self._stops)
        if not leaves:
            say("the process that speaks with the other nodes has died. Ranks that run go on; none will be started again")
        while self._ranks is not None:
            heard, _, _ = select.select([self._hears], [], [])
            for number in os.read(self._hears, 4096) if heard else b"":
                if number in HEARD:
                    self._stops += 1
                    self._stop_ranks(signal.SIGTERM)
                    if self._stops > 1:
                        self._ranks.tell(signal.SIGKILL)
            self._ranks.look()
            report = judge(self._ranks.ended, len(self._ranks.running), self._stop_code, stopping=self._stopping)
            if report is not None:
                return self._stop_code if leaves else report.code
        return self._stop_code if leaves else 1


_CUDA_WAS_USED = (
    "a module of --imports uses CUDA while it is imported, if only by torch.cuda.is_available(). The ranks are forks of the "
    "process that imports it, and CUDA does not survive a fork. Let its functions ask when they are called, or use torchrun."
)


def goes_on(program: str, config: Config, world_size: int) -> bool:
    """Whether the run can go on from its checkpoint, as far as settings tell; if not, it has been said why.

    A fork looks: a storage or a tokenizer may start threads, which later forks would not have.
    """
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 0
        with suppress(BaseException):  # what else goes wrong, the ranks will say better
            from megatron_lab.monitoring.forks import has_lost_devices
            from megatron_lab.resilience.ahead import misfit_ahead

            lacks_cuda = config.parallel.device != "cpu" and has_lost_devices()
            words = _CUDA_WAS_USED if lacks_cuda else misfit_ahead(config, world_size)
            if words is not None:
                code = REFUSED
                sys.stderr.write(f"{os.path.basename(program)}: {words}\n")
                sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != REFUSED


def main(words: Sequence[str]) -> int:
    """The exit code of the job: 0 when it is done, that of ranks that were asked to stop, 2 for wrong settings, else that of the
    first failure since there was a newer state."""
    own = settings(words)
    if own.nproc_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun; before torch is imported
    if own.serve is not None:
        from megatron_lab.resilience.point import serve_until_told

        return serve_until_told(own.serve)
    try:
        least, most = own.elastic
        # Where fewer ranks may do, the layout for those that are there is found later.
        config = parse(own.flags) if least < most else load(own.flags, most).config
    except ConfigError as error:
        sys.stderr.write(f"{os.path.basename(own.program)}: {error}\n")
        return REFUSED
    if config.checkpoint.load is None:
        say("without --load, ranks that are started again begin the run anew")
    name_process("supervisor")
    import_what_runs_need()
    if not goes_on(own.program, config, own.elastic[1]):
        return REFUSED
    gc.collect()
    gc.freeze()  # forks then leave what is there alone, and share its memory
    return Supervisor(own, config.training.exit_signal_code).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
