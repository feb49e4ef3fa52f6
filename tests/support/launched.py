"""The launch scripts of examples/: their flags, and a start of them with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for name in ("train_*.sh", "extend_*.sh") for path in EXAMPLES.glob(name))
_OWN = (
    "DATA MODEL VOCAB MERGES TOKENIZER RUN NNODES HEAD PORT DRY_RUN SKIP_CHECK MAX_RESTARTS MIN_NODES MIN_RANKS LAUNCHER PYTHON"
).split()


def environment(**variables: str) -> dict[str, str]:
    """That of this process without what a script would read, and with some variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _OWN and not name.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def words_of(script: str, *added: str, folder: Path, **variables: str) -> list[str]:
    """The command line that a script hands to its Python for a dry run."""
    python = folder / "echo-words"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *added],
        env=environment(DRY_RUN="1", PYTHON=str(python), **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split("\0")[:-1]


PYTHON = """#!/usr/bin/env bash
# Stands for Python: notes what it is to run, and does what the test says.
echo "$*" >> "$NOTES"
case "$*" in
    *--dry-run-json*) exit "${DRY_STATUS:-0}" ;;
    -c*) echo 1234 ;;
    *check_cluster.py*) exit "${CHECK_STATUS:-0}" ;;
    *resilience.supervisor* | *torch.distributed.run*) source "$TRAINING" ;;
esac
"""
SRUN = (
    '#!/usr/bin/env bash\necho "srun $*" >> "$NOTES"\necho $$ > "$NOTES.step"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
)
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >> "$NOTES"\n[[ $1 != show ]] || printf "%s\\n" node0 node1\n'
SCANCEL = """#!/usr/bin/env bash
# The signal comes to every process of a job step, torchrun's too.
echo "scancel $*" >> "$NOTES"
step=$(cat "$NOTES.step")
pkill -TERM -P "$step" || true
kill -TERM "$step"
"""


@dataclass
class Started:
    """A launch script that runs, with stand-ins."""

    process: subprocess.Popen[bytes]
    folder: Path

    def noted(self, pattern: str) -> list[str]:
        """Commands that were run."""
        notes = self.folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [line for line in lines if re.search(pattern, line)]

    def wait_for(self, pattern: str, timeout: float = 90.0) -> None:
        """Until such a command was run."""
        end = time.monotonic() + timeout
        while not self.noted(pattern):
            assert time.monotonic() < end and self.process.poll() is None, f"no {pattern}: {self.noted('')}"
            time.sleep(0.02)

    def ended(self, timeout: float = 120.0) -> tuple[int, str]:
        """Exit status and what it said on stderr."""
        try:
            return self.process.wait(timeout), (self.folder / "said").read_text()
        finally:
            self.process.kill()


def start(script: Path, folder: Path, training: str, *added: str, **variables: str) -> Started:
    """Start a script with stand-ins for Python and Slurm.

    Args:
        training: what the supervisor does, in bash; `$CHECKPOINTS` is the save folder.
    """
    folder.mkdir(exist_ok=True)
    for name, text in {"python": PYTHON, "srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "training": training}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    given = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "TRAINING": str(folder / "training"),
        "CHECKPOINTS": str(run / "checkpoints"),
        "RUN": str(run),
        "DATA": "text",
        "PYTHON": str(folder / "python"),
        **variables,
    }
    with (folder / "said").open("w") as said:  # not a pipe, which what is left behind would hold open
        process = subprocess.Popen(
            ["bash", str(script), *added],
            env=environment(**given),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    return Started(process, folder)


def header(script: str) -> dict[str, str]:
    """What the comment at the top of a script states of its dry run."""
    text = (EXAMPLES / script).read_text().partition("\nset -euo pipefail\n")[0]
    return dict(re.findall(r"^#   (memory per GPU|memory per process|tokens per step|pipeline idle) +(\S.*)$", text, re.MULTILINE))


def slurm_options(script: str) -> dict[str, str]:
    lines = [line for line in (EXAMPLES / script).read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(re.findall(r"--([\w-]+)(?:=(\S+))?", " ".join(lines)))


def flag(words: Sequence[str], name: str) -> str:
    """The last value of a flag."""
    return words[len(words) - 1 - list(reversed(words)).index(name) + 1]
