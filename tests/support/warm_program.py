"""A program for tests/program/test_warm_python.py: says what it was given, and ends as it is told."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("MINE"), sys.path[0], sys.stdin.read(), flush=True)
    print("told", file=sys.stderr)
    if sys.argv[1] == "wait":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
        print(os.getpid(), flush=True)
        time.sleep(100)
    if sys.argv[1] == "leave":  # a process behind
        if os.fork() == 0:
            os.setsid()
            time.sleep(100)
        sys.exit(0)
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raise":
        raise ValueError("wrong")
    sys.exit(int(sys.argv[1]))
