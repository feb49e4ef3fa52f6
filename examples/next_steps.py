"""Print commands for the end of quickstart.sh, which continue with its run. They state their duration and disk space, estimated
from the measured speed of the run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started from any folder

from megatron.config.cli import load
from megatron.config.save import from_dict
from megatron.data.tokenizer import predict_embedding_rows
from megatron.metrics.history import History, read_history
from megatron.spec.counts import count_parameters
from megatron_lab.monitoring.durations import estimate_run, find_latest_checkpoint, format_megabytes, measure_folder
from megatron_lab.terminal import wrap_command

WIDTH = 79
ROOT = Path(__file__).resolve().parents[1]
_NUM_RANKS = 8
_LENGTH_FACTOR = 3
"""Length of the proposed runs, as a multiple of the run of the quick start."""
_BIGGER_MODEL = ["--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "8", "--lr", "3e-3", "--min-lr", "3e-4"]


def describe_cost(history: History, checkpoint: Path, flags: Sequence[str], start_iteration: int) -> str:
    """Return a sentence with the estimated duration and disk space of a training command.

    Args:
        history: history of the run of the quick start.
        checkpoint: folder of a checkpoint of this run.
        flags: flags of the command.
        start_iteration: iteration from which the command continues.
    """
    measured, config = from_dict(history.starts[-1]["config"]), load(flags, _NUM_RANKS).config
    vocab_size = predict_embedding_rows(config.data)
    return f"About {estimate_run(history, measure_folder(checkpoint), measured, config, vocab_size, start_iteration).format()}."


def list_steps(folder: Path, python: str, prompt: str) -> Iterator[tuple[str, list[str]]]:
    """Yield descriptions and commands.

    Args:
        folder: folder of the quick start, with the run, its settings and its checkpoints.
        python: Python program for the commands.
        prompt: start of the generated text.

    Raises:
        ValueError: the run has no checkpoint, or no measured steps.
    """
    checkpoints, settings = folder / "run" / "checkpoints", str(folder / "run" / "settings.yaml")
    history, checkpoint = read_history(checkpoints), find_latest_checkpoint(checkpoints)
    if checkpoint is None:
        raise ValueError(f"there is no checkpoint in {checkpoints}. Start examples/quickstart.sh again")
    last_iteration = history.steps[-1].iteration
    longer = str(_LENGTH_FACTOR * last_iteration)
    start = [python, str(ROOT / "pretrain_gpt.py"), "--nproc", str(_NUM_RANKS)]

    flags = ["--config", settings, "--train-iters", longer, "--lr-decay-iters", longer]
    load_flags = ["--load", str(checkpoints), "--resume-schedule", "new"]
    cost = describe_cost(history, checkpoint, [*flags, *load_flags], last_iteration)
    description = f"Longer: {longer} iterations in total; the learning rate decays over all of them (--resume-schedule new)."
    yield f"{description} {cost}", [*start, *flags, *load_flags]

    bigger = folder / "bigger"
    paths = ["--save", str(bigger / "checkpoints"), "--load", str(bigger / "checkpoints")]
    bigger_flags = [*flags, *_BIGGER_MODEL, *paths, "--metrics-file", str(bigger / "metrics.jsonl")]
    cost = describe_cost(history, checkpoint, bigger_flags, 0)
    description = "Bigger: twice as deep and twice as wide, in a separate run."
    yield f"{description} {cost} Ctrl-C saves it, and the same command resumes it.", [*start, *bigger_flags]

    generate = ["--load", str(checkpoints), "--device", "cpu", "--prompt", prompt, "--max-new-tokens", "200"]
    yield "More generated text, after a prompt that you choose.", [python, str(ROOT / "tools" / "generate_text.py"), *generate]

    config = from_dict(history.starts[-1]["config"])
    num_bytes = 4 * count_parameters(config.model, predict_embedding_rows(config.data))
    exported = str(folder / "exported")
    yield (
        f"Export the model to a folder for Hugging Face's tools: {format_megabytes(num_bytes)} of disk.",
        [python, str(ROOT / "tools" / "checkpoint.py"), "export", str(checkpoints), exported],
    )
    yield "Install these tools once.", [python, "-m", "pip", "install", "-e", f"{ROOT}[transformers]"]
    repository = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name)
    description = "Upload it to a repository of yours on the Hugging Face hub; run 'hf auth login' once before."
    yield description, ["hf", "upload", repository, exported]


def main(argv: list[str] | None = None) -> int:
    """Print the commands. Returns the exit status: 0, or 1 if the files of the run are missing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of quickstart.sh")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="Python program for the commands")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="start of the generated text")
    args = parser.parse_args(argv)
    try:
        for description, command in list_steps(args.folder.resolve(), args.python, args.prompt):
            print("", *textwrap.wrap(description, WIDTH, initial_indent="# ", subsequent_indent="# "), sep="\n")
            print("\n".join(wrap_command(shlex.join(command), WIDTH)))
    except (ValueError, OSError) as error:
        print(f"quickstart.sh: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
