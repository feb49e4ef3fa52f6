"""Pretrain a GPT- or Llama-style model: `python pretrain_gpt.py ...` on one device, `torchrun ... pretrain_gpt.py ...` on many.

Installed, it is `python -m pretrain_gpt ...`, `torchrun ... -m pretrain_gpt ...`, or `megatron-pretrain ...` for one device.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__" or sys.argv[0].endswith("megatron-pretrain"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports ends the process without a traceback

import time
from typing import TYPE_CHECKING

from megatron.config.cli import PROGRAM, LoadedConfig, load_or_exit
from megatron.config.given import DryRun, check_output, without_gaps
from megatron.config.launcher import launched
from megatron.training.signals import ExitSignals

if TYPE_CHECKING:
    from megatron.training.failure import Explanations


def main(argv: list[str]) -> None:
    """Settings, then everything else. Nothing that needs torch is imported before the settings are known to be right."""
    started_at = time.monotonic()
    if "--plan" in argv:
        sys.exit(look_for_layouts(argv))
    loaded, code = load_or_exit(argv), 0
    if loaded.dry_run is None:
        check_trace_file(loaded.config.debug.save_trace)
    else:
        from megatron_lab.planner.garbage import collect_seldom

        collect_seldom()

    with ExitSignals(loaded.config.training.exit_signal_code) as signals:
        from megatron.training.failure import leave_well, reported_failures

        with reported_failures() as explanations:
            if loaded.dry_run is not None:
                rehearse(loaded, loaded.dry_run)
            elif pretrain(loaded, argv, started_at, explanations, signals):
                code = signals.code
    leave_well(code)


def look_for_layouts(argv: list[str]) -> int:
    """Hand a command line with --plan to the planner, with the launcher's number of ranks; returns the exit status."""
    from megatron_lab.commands.plan import main as plan

    job = launched()
    return 0 if job.rank else plan(["--gpus", str(job.world_size), *(word for word in argv if word != "--plan")])


def check_trace_file(path: str | None) -> None:
    """End a run whose --save-trace cannot be written before it connects and builds the model.

    The first rank writes the file, and other nodes may not have its folder. So the ranks of the first node look, which all find
    the same, and the first tells it.
    """
    job = launched()
    if path is None or job.rank != job.local_rank:
        return
    try:
        check_output("--save-trace", path)
    except ValueError as error:
        if job.rank == 0:
            sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(2)


def rehearse(loaded: LoadedConfig, job: DryRun) -> None:
    """Lay the job out instead of running it. One process tells what every rank will keep, send and compute.

    What is told comes before what is written: a full disk does not take the plan away.
    """
    from megatron.data.tokenizer import planned_rows
    from megatron.parallel.topology import Topology
    from megatron_lab.planner.dry_run import Planner
    from megatron_lab.planner.fit import with_fit_advice, with_least_layers
    from megatron_lab.planner.plan import write_plan
    from megatron_lab.planner.plan_text import format_plan
    from megatron_lab.planner.step_time import cluster_of, dtype_of, time_of
    from megatron_lab.resilience.ahead import check_ahead

    if launched().rank > 0:
        return
    try:
        for flag, file in (("--dry-run-json", job.json_file), ("--dry-run-html", job.html_file)):
            if file is not None:
                check_output(flag, file)
        vocab_size = planned_rows(loaded.config.data)
        config = with_least_layers(loaded.config, job, vocab_size)
        cluster = cluster_of(config)
        plan, work = Planner(config, job, vocab_size).plan_and_work()
        plan = with_fit_advice(plan, config, job, vocab_size)
        known = cluster is not None and cluster.knows(dtype_of(config))
        time = time_of(work, config, job, vocab_size, cluster) if cluster is not None and known else None
        print("\n".join([*format_plan(plan, time), *loaded.notes]), flush=True)
        if job.json_file is not None:
            write_plan(plan, job.json_file, None if time is None else time.to_json())
        if job.html_file is not None:
            from megatron_lab.pages.html import write_page
            from megatron_lab.pages.plan_page import plan_page

            topology = Topology.of(config.parallel, job.world_size)
            write_page("--dry-run-html", job.html_file, plan_page(plan, topology, time, loaded.notes))
        if loaded.config == without_gaps(loaded.config):  # as it would be started
            check_ahead(loaded.config, job.world_size, only_what_is_there=True)
    except ValueError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(2)


def pretrain(loaded: LoadedConfig, argv: list[str], started_at: float, explanations: Explanations, signals: ExitSignals) -> bool:
    """The run: what its settings make, then training to its end. Returns whether a signal ended it."""
    from megatron.training.trainer import Trainer

    with Trainer(loaded, command=argv, started_at=started_at, signals=signals, explanations=explanations, draws=True) as trainer:
        return trainer.fit()


def run() -> int:
    """Run the program with the words of the command line; returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # before there is a run
        sys.stderr.write("pretrain_gpt.py: interrupted\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run())
