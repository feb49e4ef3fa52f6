"""Pretrain a GPT- or Llama-style model.

Run `python pretrain_gpt.py ...` for one device, `python pretrain_gpt.py --nproc 8 ...` for the devices of a node, and `torchrun ...
pretrain_gpt.py ...` for several nodes. As an installed package, run `megatron-train ...`, or `torchrun ... -m pretrain_gpt ...`.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__" or sys.argv[0].endswith(("megatron-train", "megatron-pretrain")):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    for fd in range(3):  # a closed stream (`2>&-`) would leave its descriptor to the next file that is opened
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")

import time
from typing import TYPE_CHECKING

from megatron.config.cli import LoadedConfig, load_or_exit
from megatron.config.launcher import end_with_message, read_process_info, write_error_file, write_message_after_torchrun
from megatron.config.parsed_flags import DryRun, fill_plan_defaults, find_launcher_flags
from megatron.config.regular_file import check_output
from megatron.training.signals import EXIT_INTERRUPTED, ExitSignals, create_exit_signals

if TYPE_CHECKING:
    from megatron.training.failure import Explanations


def main(argv: list[str]) -> None:
    """Parse the settings, then train, or with --dry-run print the plan of the run. Modules that need torch are imported only after
    the settings are checked."""
    started_at = time.monotonic()
    if any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
        from megatron_lab.terminal import fit_output_to_terminal

        fit_output_to_terminal()
    if find_launcher_flags(argv):
        from megatron_lab.resilience.node_launcher import launch_ranks

        argv = launch_ranks(__file__, argv)
    if "--plan" in argv:
        sys.exit(plan_layouts(argv))
    settings, code = load_or_exit(argv), 0
    if settings.dry_run is None:
        check_trace_file(settings.config.debug.save_trace)
    else:
        from megatron_lab.planner.garbage_collection import collect_garbage_rarely

        collect_garbage_rarely()

    with create_exit_signals(settings.config) as signals:
        from megatron.training.failure import exit_immediately, report_failures

        with report_failures() as explanations:
            if settings.dry_run is not None:
                plan_run(settings, settings.dry_run)
            elif pretrain(settings, argv, started_at, explanations, signals):
                code = signals.code
    exit_immediately(code)


def plan_layouts(argv: list[str]) -> int:
    """Run the planner of parallel layouts (tools/plan.py) for a command line with --plan, with the launcher's number of ranks.
    Returns the exit status."""
    from megatron_lab.commands.plan import main as plan

    job = read_process_info()
    return 0 if job.rank else plan(["--gpus", str(job.world_size), *(token for token in argv if token != "--plan")])


def check_trace_file(path: str | None) -> None:
    """Exit with an error if the file of --save-trace cannot be written. This is checked before the ranks connect and build the
    model.

    The first rank writes the file. Other nodes may not have its folder, so only the ranks of the first node check the file. All of
    them get the same answer and exit, and the first rank prints the error.
    """
    job = read_process_info()
    if path is None or job.rank != job.local_rank:
        return
    try:
        check_output("--save-trace", path)
    except ValueError as error:
        end_with_message(str(error))
        sys.exit(2)


def plan_run(settings: LoadedConfig, job: DryRun) -> None:
    """Plan the run instead of running it (--dry-run): compute in this process the memory, communication and computation of every
    rank, and print them.

    The plan is printed before files are written, so that it is not lost if the disk is full.
    """
    from megatron.data.tokenizer import predict_embedding_rows
    from megatron.parallel.topology import Topology
    from megatron_lab.data_tools.epochs import describe_planned_epochs
    from megatron_lab.planner.dry_run import Planner
    from megatron_lab.planner.fit import add_fit_advice, resolve_auto_recompute_layers
    from megatron_lab.planner.plan import write_plan
    from megatron_lab.planner.plan_text import format_plan
    from megatron_lab.planner.step_time import get_dtype_name, load_plan_cluster, predict_from_work
    from megatron_lab.resilience.resume_check import check_resume
    from megatron_lab.terminal import get_terminal_width

    if read_process_info().rank > 0:
        return
    try:
        for flag, file in (("--dry-run-json", job.json_file), ("--dry-run-html", job.html_file)):
            if file is not None:
                check_output(flag, file)
        vocab_size = predict_embedding_rows(settings.config.data)
        config = resolve_auto_recompute_layers(settings.config, job, vocab_size)
        cluster = load_plan_cluster(config)
        plan, work = Planner(config, job, vocab_size).plan_and_work()
        plan = add_fit_advice(plan, config, job, vocab_size)
        knows_dtype = cluster is not None and cluster.has_peak(get_dtype_name(config))
        time = predict_from_work(work, config, job, vocab_size, cluster) if cluster is not None and knows_dtype else None
        notes = [*describe_planned_epochs(config, job.world_size), *settings.notes]
        print("\n".join([*format_plan(plan, time, get_terminal_width()), *notes]), flush=True)
        if job.json_file is not None:
            write_plan(plan, job.json_file, None if time is None else time.to_json())
        if job.html_file is not None:
            from megatron_lab.pages.html import write_page
            from megatron_lab.pages.plan_page import build_plan_page

            topology = Topology.of(config.parallel, job.world_size)
            write_page("--dry-run-html", job.html_file, build_plan_page(plan, topology, time, notes))
        if settings.config == fill_plan_defaults(
            settings.config
        ):  # if the dry run did not fill in missing settings, the run can start like this
            check_resume(settings.config, job.world_size, ignores_missing=True)
    except ValueError as error:
        end_with_message(str(error))
        sys.exit(2)


def pretrain(settings: LoadedConfig, argv: list[str], started_at: float, explanations: Explanations, signals: ExitSignals) -> bool:
    """Build the run from its settings and train to the end. Returns whether a signal ended the run.

    Args:
        argv: arguments of the command line, for the history file of the run.
        started_at: time at which the job started, by time.monotonic().
        explanations: registry in which components explain errors.
        signals: handler of the signals that ask the run to exit.
    """
    from megatron.training.trainer import Trainer

    with Trainer(
        settings, command=argv, started_at=started_at, signals=signals, explanations=explanations, draw_record=True
    ) as trainer:
        is_stopped = trainer.fit()
        if is_stopped:
            save = settings.config.checkpoint.save
            result = "nothing is saved, because --save is not set" if save is None else f"resume with --load {save}"
            message = f"exited {signals.describe()} at iteration {trainer.iteration}: {result}"
            write_error_file(message, is_consequence=True)  # not a failure of this rank
            write_message_after_torchrun(message)
        return is_stopped


def run() -> int:
    """Run the program with the arguments of the command line. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # before the run handles interrupts
        end_with_message("interrupted")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(run())
