"""Body of the `python` that tests/support/warm_python.py makes: it has a warm process run a command line, or does so itself.

Only the standard library, and little of it: this is started often.
"""

import contextlib
import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
WITH_TORCH = ("megatron_lab.monitoring.rehearsal_child",)
"""Of the modules that a run starts with -P, those that import torch; for others a fresh interpreter is as quick."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def wanted(words: list[str], root: str) -> bool:
    """Whether the command line is a script or a module of the repository, from its source."""
    if words[:1] == ["-u"]:
        words = words[1:]
    if words[:2] == ["-P", "-m"] and words[2] in WITH_TORCH:
        words = words[1:]
    if words[:1] == ["-m"]:
        found = root in (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
        return len(words) > 1 and found
    return bool(words) and words[0].endswith(".py") and os.path.realpath(words[0]).startswith(root + "/")


def main() -> None:
    with open(os.path.join(HERE, "about.json")) as file:
        about = json.load(file)
    words = sys.argv[1:]
    if not wanted(words, about["root"]):
        os.execv(about["python"], [about["python"], *words])
    numbers = [0, 1, 2, *handed_on()]
    job = {"words": words, "numbers": numbers, "cwd": os.getcwd(), "env": dict(os.environ), "executable": os.path.abspath(__file__)}
    content = json.dumps(job).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # the program may run before its process id arrives here
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(HERE, "socket"))
        connection.sendall(len(content).to_bytes(4, "little"))
        socket.send_fds(connection, [content[:1]], numbers)
        for number in numbers[3:]:  # where the program ends, all ends of these pipes are closed
            os.close(number)
        connection.sendall(content[1:])
        with connection.makefile() as answers:
            pid = int(answers.readline())
            for number in FORWARDED:
                signal.signal(number, lambda number, _: forward(pid, number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:  # as it has ended
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def handed_on() -> list[int]:
    """Further files that whoever started this has left open for the program: nothing that is opened here can be inherited."""
    found = []
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def forward(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


main()
