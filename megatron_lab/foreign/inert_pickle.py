"""Reads a pickle as data: nothing that it names is looked up, and nothing is called.

A pickle is a program for a machine with a stack. This one knows the opcodes that put plain values and objects together. What would
be a call of `module.name` becomes a record of that call, so the file says what was saved and can do nothing. Work and memory are in
proportion to the bytes of the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError


@dataclass(eq=False)
class Named:
    """A class or a function, by `module.name`."""

    name: str


@dataclass(eq=False)
class Made:
    """What a call of something named would have given, and the state that it would have been given then."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


_MARK = object()
_PLAIN = frozenset(
    (
        *("BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()),
        *("BINBYTES SHORT_BINBYTES BINBYTES8".split()),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""Python 3.11.0 to 3.11.3 write a member of an enum as getattr(its class, its name); protocol 2 has the older name of builtins."""
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, where: str, known: Collection[str]) -> Any:
    """The value of a pickle, in plain containers, `Named` and `Made`.

    Args:
        where: its file, for messages.
        known: the names that may stand in it.

    Raises:
        CheckpointError: it has another name, or does something else than put values together.
        DamagedCheckpointError: it is truncated or altered.
    """
    try:
        return _Machine(where, known).run(data)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{where} is truncated, altered or no pickle ({str(error)[:80]})") from error


class _Machine:
    """The stack, and what was put aside to be used again."""

    def __init__(self, where: str, known: Collection[str]) -> None:
        self._where, self._known = where, known
        self._stack: list[Any] = []
        self._aside: dict[int, Any] = {}
        self._doing: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "TUPLE": lambda _: self._stack.append(tuple(self._to_mark())),
            "MEMOIZE": lambda _: self._put(len(self._aside)),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda at: self._stack.append(self._aside[at])),
            "APPEND": lambda _: self._append([self._stack.pop()]),
            "APPENDS": lambda _: self._append(self._to_mark()),
            "SETITEM": lambda _: self._set([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set(self._to_mark()),
            "GLOBAL": lambda name: self._name(*name.split(" ")),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._make()),
            "BUILD": lambda _: self._build(self._stack.pop()),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        }

    def run(self, data: bytes) -> Any:
        for opcode, argument, place in pickletools.genops(data):
            name = opcode.name
            if name in _PLAIN:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                count = _TUPLES[name]
                parts = [self._stack.pop() for _ in range(count)]
                self._stack.append(tuple(reversed(parts)))
            elif name in self._doing:
                self._doing[name](argument)
            elif name == "STOP":
                (found,) = self._stack
                return found
            else:
                raise CheckpointError(
                    f"{self._where} is a pickle with the opcode {name} (byte {place}), which data does not need: "
                    "nothing of it was run"
                )
        raise ValueError("it has no end")

    def _to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            if (at := at - 1) < 0:
                raise ValueError("no mark")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _put(self, at: int) -> None:
        self._aside[at] = self._stack[-1]

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"a {type(target).__name__} takes no values")
        target += values

    def _set(self, flat: list[Any]) -> None:
        target, keys = self._stack[-1], flat[::2]
        if isinstance(target, Made):  # a kind of dictionary
            target.state = target.state or {}
            target = target.state
        # The hash of a tuple of tuples of ... would take for ever.
        if not isinstance(target, dict) or not all(isinstance(key, str | int | Made) for key in keys):
            raise ValueError("values are put under keys that data does not have")
        target.update(zip(keys, flat[1::2], strict=True))

    def _name(self, module: Any, name: Any) -> None:
        whole = f"{module}.{name}"
        if whole not in self._known and whole not in _GETATTR:
            raise CheckpointError(
                f"{self._where} asks for {whole[:200]}, which its kind of file does not need: nothing of it was run"
            )
        self._stack.append(Named(whole))

    def _make(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Named) or not isinstance(args, tuple):
            raise ValueError("a call of something that has no name")
        if called.name in _GETATTR:
            called, *args = args
            if not isinstance(called, Named) or list(map(type, args)) != [str]:
                raise ValueError("getattr of something else than a class and a name")
        self._stack.append(Made(called.name, tuple(args)))

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if not isinstance(target, Made):
            raise ValueError("a state of something that was not made")
        target.state = state
