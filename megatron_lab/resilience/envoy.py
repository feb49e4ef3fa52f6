"""A process beside each supervisor that speaks for its node: it reads and changes the roll, beats, watches the beats of others, and
plans the next start where its node is the first.

So the supervisor itself never waits for a store or for a dry run, has no thread and opens no CUDA: it forks the ranks.
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

from megatron.config.cli import PROGRAM, load
from megatron.config.errors import ConfigError
from megatron.training.signals import REFUSED
from megatron_lab.resilience import layouts
from megatron_lab.resilience.book import Book, StoreAway, update
from megatron_lab.resilience.messages import Ended, Enter, EnvoyOrders, Halt, Leave, Over, Say, Start, Stop, StopRanks, Wish
from megatron_lab.resilience.ranks import bind_to, name_process, own_signals
from megatron_lab.resilience.roll import Life, Roll, Seat, StartPlan

_LOOK_EVERY_S = 0.2
_TELL_AFTER_S, _TELL_EVERY_S = 10.0, 60.0
_STORE_LOST = (
    "the store of the nodes is lost ({}). Ranks that run go on; none can be started again until a store serves at the same address "
    "(--serve)"
)


class Envoy:
    """One node's part in the meeting of the nodes.

    Args:
        life: what the ranks of this node have made.
    """

    def __init__(self, orders: EnvoyOrders, book: Book, pipe: Connection, life: Callable[[], Life]) -> None:
        self._orders, self._book, self._pipe, self._life = orders, book, pipe, life
        self._wishes: list[Wish] = []
        self._started = 0
        """The last start in which this node has ranks."""
        self._in_start = self._running = self._entered = self._told_to_stop = False
        self._enters_with: Enter | None = None
        self._seen: dict[str, tuple[int, float]] = {}
        self._ready: tuple[str, ...] = ()
        self._unplanned: tuple[str, ...] | None = None
        self._quiet_since = self._waits_since = time.monotonic()
        self._tell_at = self._waits_since + _TELL_AFTER_S

    def run(self) -> None:
        """Until the job is over."""
        away_since = None
        while True:
            if self._pipe.poll(_LOOK_EVERY_S if not self._wishes or away_since is not None else 0):
                self._wishes.append(self._pipe.recv())
                continue
            try:
                if self._turn():
                    return
                if away_since is not None:
                    self._pipe.send(Say("the store of the nodes answers again"))
                away_since = None
            except StoreAway as error:
                if away_since is None:
                    away_since = time.monotonic()
                    self._pipe.send(Say(_STORE_LOST.format(error)))
                if not self._running and time.monotonic() > away_since + self._orders.gives_up_after_s:
                    self._pipe.send(Over(1, "the store of the nodes did not come back"))
                    return

    def _turn(self) -> bool:
        """One look at the roll; returns whether the job is over."""
        me = self._orders.name
        roll = self._book.read()
        while self._wishes:
            wish = self._wishes[0]
            roll = update(self._book, self._wished(wish))
            if isinstance(wish, Enter) and me not in roll.members:
                break  # a job of the same name ends just now
            self._wishes.pop(0)
            if isinstance(wish, Leave):
                return True
            if isinstance(wish, Ended) and wish.enters is not None:
                self._wishes.insert(0, wish.enters)
            if isinstance(wish, Enter):
                self._in_start, self._enters_with = False, wish
                if not self._entered:
                    self._book.begin(me)
                    self._entered = True
        for name in self._lost(roll):
            roll = self._lose(name)
        if not self._entered:
            return False
        if roll.phase == "over":
            self._lose(me)
            self._pipe.send(Over(roll.code, roll.words))
            return True
        if me not in roll.members:
            if self._in_start:
                self._halt("this node was taken for lost", gentle=False)
            elif self._enters_with is not None:
                self._wishes.append(self._enters_with)
        elif roll.phase == "gathering":
            if self._in_start:
                self._halt(roll.why, gentle=roll.gentle)
            self._gather(roll)
        else:
            self._follow(roll)
        return False

    def _wished(self, wish: Wish) -> Callable[[Roll], Roll]:
        me, limits = self._orders.name, self._orders.limits
        if isinstance(wish, Leave):
            return lambda roll: roll.leaving(me)
        if isinstance(wish, Stop):
            return lambda roll: roll.asked_to_stop(wish.code)
        if isinstance(wish, Ended):
            self._running = False
            return lambda roll: roll.reported(me, wish.generation, wish.report, self._life(), limits)
        seat = Seat(wish.places, self._orders.address)
        return lambda roll: roll.entered(me, seat, limits, at_once=self._orders.at_once)

    def _lose(self, name: str) -> Roll:
        return update(self._book, lambda roll: roll.lost(name, self._life(), self._orders.limits))

    def _halt(self, why: str, *, gentle: bool) -> None:
        self._in_start = self._running = False
        self._pipe.send(Halt(why, gentle))

    def _follow(self, roll: Roll) -> None:
        """A start has begun."""
        me = self._orders.name
        if roll.generation != self._started:
            if self._in_start:
                self._halt(roll.why, gentle=False)
            elif me in roll.order and roll.plan is not None:
                self._started, self._in_start, self._running, self._told_to_stop = roll.generation, True, True, False
                places = sum(seat.places for seat in roll.members.values())
                may_lose = max(0, places - self._orders.limits.ranks[0])
                self._pipe.send(Start(roll.generation, roll.order.index(me), roll.plan, may_lose, roll.why))
        if roll.told and self._running and not self._told_to_stop:
            self._told_to_stop = True
            self._pipe.send(StopRanks())
        self._waits_since = time.monotonic()
        self._tell_at = self._waits_since + _TELL_AFTER_S

    def _gather(self, roll: Roll) -> None:
        """A round is open: close it, if that is this node's part, or tell what is waited for."""
        limits, now = self._orders.limits, time.monotonic()
        if roll.ready != self._ready:
            self._ready, self._quiet_since, self._unplanned = roll.ready, now, None
        order = roll.seated(limits.nodes[1])
        if order[:1] == (self._orders.name,) and self._unplanned is None:
            if roll.can_close(limits, now - self._quiet_since):
                self._close(roll, order)
                return
            if len(roll.ready) == len(roll.members) >= limits.nodes[1]:
                self._unplanned = roll.ready
        if self._unplanned is not None and len(order) >= limits.nodes[1]:
            update(
                self._book,
                lambda roll: roll.ended(roll.code or 1, f"no layout of the job fits the places that are left ({roll.why})"),
            )
        elif now > self._waits_since + self._orders.gives_up_after_s:
            words = f"not enough nodes came in {self._orders.gives_up_after_s:.0f} s (--join-timeout-s)"
            update(self._book, lambda roll: roll.ended(roll.code or 1, words))
        elif now > self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            places = sum(roll.members[name].places for name in roll.ready)
            least, most = limits.nodes
            self._pipe.send(
                Say(
                    f"waiting for nodes: {len(roll.ready)} are here with {places} places; the job takes {least}"
                    f"{f' to {most}' if most > least else ''} nodes and at least {limits.ranks[0]} places"
                )
            )

    def _close(self, roll: Roll, order: Sequence[str]) -> None:
        places = {name: roll.members[name].places for name in order}
        try:
            found = planned(self._orders, roll, places)
        except ConfigError as error:
            words = f"{PROGRAM}: {error}"
            update(self._book, lambda roll: roll.ended(REFUSED, words))
            return
        if found is None:
            self._unplanned = roll.ready
        elif self._book.swap(roll, roll.closed(*found)):
            self._follow(roll.closed(*found))

    def _lost(self, roll: Roll) -> list[str]:
        """Nodes whose beats have stopped. The first node watches all, all others watch the first."""
        watched = [name for name in roll.members if name != self._orders.name]
        if next(iter(roll.members), None) != self._orders.name:
            watched = watched[:1]
        now, lost = time.monotonic(), []
        for name in watched:
            beats = self._book.beats(name)
            before, at = self._seen.get(name, (-1, now))
            if beats != before:
                self._seen[name] = beats, now
            elif now > at + self._orders.lost_after_s:
                lost.append(name)
        self._seen = {name: self._seen[name] for name in watched if name not in lost}
        return lost


def planned(orders: EnvoyOrders, roll: Roll, places: Mapping[str, int]) -> tuple[StartPlan, int] | None:
    """The next start with these places, and the global batch size of the job; None if no layout fits them.

    Args:
        places: those of each node, in the order of their ranks.

    Raises:
        ConfigError: the settings cannot be run, with these ranks or with any.
    """
    argv, most = orders.argv, orders.limits.ranks[1]
    config = layouts.pinned(argv, roll.batch)
    if roll.generation == 0 and sum(places.values()) >= most:
        load(argv, most)
    layout = layouts.nearest(config, places, most, layouts.fits_memory)
    if layout is None:
        if roll.generation == 0:
            load(argv, min(most, sum(places.values())))
        return None
    changed = layout.change.apply(config, layout.world_size)[0]
    batch = roll.batch or layouts.batch_of(changed, layout.world_size)
    flags = layouts.words(layout, argv, batch)
    if config.checkpoint.save is not None and roll.plan is not None and next(iter(roll.plan.counts)) != next(iter(places)):
        flags.append("--take-over")  # the node that is lost cannot tell that its run is
    notes = layouts.described(layout, config, most)
    return StartPlan(layout.counts, tuple(flags), orders.address, free_port(), tuple(notes)), batch


def free_port() -> int:
    """A port that nobody listens on, below those that the system takes for outgoing connections."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def start_envoy(orders: EnvoyOrders, make_book: Callable[[], Book], life: Callable[[], Life]) -> tuple[int, Connection]:
    """Fork the envoy; returns its process, and the pipe to it."""
    ours, its = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        its.close()
        return pid, ours
    try:
        ours.close()
        os.setsid()  # what stops the supervisor is not for the envoy
        bind_to(parent, signal.SIGKILL)
        own_signals()
        name_process("envoy")
        Envoy(orders, make_book(), its, life).run()
    except EOFError:  # the supervisor has ended
        pass
    except BaseException:  # noqa: BLE001 - never return into the supervisor
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
