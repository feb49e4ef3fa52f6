"""Pickle reader that executes nothing: it imports no name and calls no function.

A pickle is a program for a stack machine. This reader implements only the opcodes that build plain values and objects. A call of
`module.name` becomes a `CallRecord`, so a file can describe data but cannot run code. Time and memory are linear in the size of the
file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError


@dataclass(eq=False)
class GlobalName:
    """Class or function that a pickle refers to by its name `module.name`. The reader does not import it."""

    name: str


@dataclass(eq=False)
class CallRecord:
    """Call that a pickle requests, recorded instead of executed.

    Args:
        name: full name of the function or class that the pickle calls.
        args: arguments of the call.
        state: attributes that the pickle sets on the returned object, or None.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


_MARK = object()
_VALUE_OPCODES = frozenset(
    (
        *("BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()),
        *("BINBYTES SHORT_BINBYTES BINBYTES8".split()),
    )
)
_CONSTANT_OPCODES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""Names of getattr. Python 3.11.0 to 3.11.3 pickle an enum member as getattr(enum class, member name). Protocol 2 uses the name
of the builtins module in Python 2."""
_TUPLE_OPCODES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, path: str, allowed_names: Collection[str]) -> Any:
    """Return the value that a pickle describes, without executing anything. Classes and functions become `GlobalName` objects, and
    calls become `CallRecord` objects.

    Args:
        data: bytes of the pickle.
        path: file, for error messages.
        allowed_names: names of classes and functions that the pickle may contain.

    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or an opcode that plain data does not need.
        DamagedCheckpointError: the pickle is truncated or altered.
    """
    try:
        return _PickleInterpreter(path, allowed_names).run(data)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read as a pickle: {str(error)[:300]}. If a new copy of the file gives the same error, use another "
            "checkpoint of the run"
        ) from error


class _PickleInterpreter:
    """Interpreter of a pickle, which is a program for a stack machine. A memo holds the values that the pickle uses more than
    once."""

    def __init__(self, path: str, allowed_names: Collection[str]) -> None:
        self._path, self._allowed_names = path, allowed_names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "MEMOIZE": lambda _: self._memoize(len(self._memo)),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._memoize),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda at: self._stack.append(self._memo[at])),
            "APPEND": lambda _: self._extend_list([self._stack.pop()]),
            "APPENDS": lambda _: self._extend_list(self._pop_to_mark()),
            "SETITEM": lambda _: self._update_dict([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._update_dict(self._pop_to_mark()),
            "GLOBAL": lambda name: self._push_name(*name.split(" ")),
            "STACK_GLOBAL": lambda _: self._push_name(self._stack.pop(-2), self._stack.pop()),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda _: self._push_call()),
            "BUILD": lambda _: self._set_state(self._stack.pop()),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        }

    def run(self, data: bytes) -> Any:
        """Interpret the opcodes of a pickle, and return the value that it describes."""
        for opcode, argument, position in pickletools.genops(data):
            name = opcode.name
            if name in _VALUE_OPCODES:
                self._stack.append(argument)
            elif name in _CONSTANT_OPCODES:
                self._stack.append(_CONSTANT_OPCODES[name])
            elif name in _TUPLE_OPCODES:
                count = _TUPLE_OPCODES[name]
                items = [self._stack.pop() for _ in range(count)]
                self._stack.append(tuple(reversed(items)))
            elif name in self._handlers:
                self._handlers[name](argument)
            elif name == "STOP":
                (result,) = self._stack
                return result
            else:
                raise CheckpointError(
                    f"{self._path} is a pickle with the opcode {name} (at byte {position}), which plain data does not need. For "
                    "safety, the file is not read; nothing in it was run. Copy the original file again"
                )
        raise ValueError("the pickle has no end (opcode STOP), so its file is truncated. Copy the file again")

    def _pop_to_mark(self) -> list[Any]:
        """Remove the topmost mark and the values above it from the stack, and return these values. In a pickle, the opcode MARK
        puts a mark on the stack before the items of a list, tuple or dictionary."""
        mark_index = len(self._stack) - 1
        while self._stack[mark_index] is not _MARK:
            if (mark_index := mark_index - 1) < 0:
                raise ValueError(
                    "a list, tuple or dictionary in the pickle has no start (opcode MARK), so its file is damaged. "
                    "Copy the file again"
                )
        items = self._stack[mark_index + 1 :]
        del self._stack[mark_index:]
        return items

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _extend_list(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError(
                f"the pickle appends list items to a value of type {type(target).__name__}, so its file is damaged. "
                "Copy the file again"
            )
        target += values

    def _update_dict(self, keys_and_values: list[Any]) -> None:
        """Add entries to the dictionary on top of the stack, which may be the record of a dictionary subclass.

        Args:
            keys_and_values: keys and values of the entries, alternating.
        """
        target, keys = self._stack[-1], keys_and_values[::2]
        if isinstance(target, CallRecord):  # for example an OrderedDict
            target.state = target.state or {}
            target = target.state
        # Deeply nested tuples are not allowed as keys, because hashing them can take exponential time.
        if not isinstance(target, dict) or not all(isinstance(key, str | int | CallRecord) for key in keys):
            raise ValueError(
                "the pickle sets entries of a value that is not a dictionary, or a key has a wrong type, so its file is "
                "damaged. Copy the file again"
            )
        target.update(zip(keys, keys_and_values[1::2], strict=True))

    def _push_name(self, module: Any, name: Any) -> None:
        """Push the name of a class or function on the stack, as a `GlobalName`.

        Raises:
            CheckpointError: the name is not allowed.
        """
        full_name = f"{module}.{name}"
        if full_name not in self._allowed_names and full_name not in _GETATTR:
            raise CheckpointError(
                f"{self._path} asks for the class or function {full_name[:200]}, which a file of this type does not need. For "
                "safety, the file is not read; nothing in it was run. Copy the original file again"
            )
        self._stack.append(GlobalName(full_name))

    def _push_call(self) -> None:
        """Replace the function and its arguments, which are on top of the stack, with a `CallRecord`."""
        args, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, GlobalName) or not isinstance(args, tuple):
            raise ValueError(
                "the pickle calls a value that is not a named function or class, so its file is damaged. Copy the file again"
            )
        if function.name in _GETATTR:
            function, *args = args
            if not isinstance(function, GlobalName) or list(map(type, args)) != [str]:
                raise ValueError("the pickle calls getattr without a class and a name, so its file is damaged. Copy the file again")
        self._stack.append(CallRecord(function.name, tuple(args)))

    def _set_state(self, state: Any) -> None:
        """Store the attributes that the pickle sets on an object in the object's `CallRecord`, which is on top of the stack."""
        target = self._stack[-1]
        if not isinstance(target, CallRecord):
            raise ValueError(
                "the pickle sets attributes of a value that is not an object, so its file is damaged. Copy the file again"
            )
        target.state = state
