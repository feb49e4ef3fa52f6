"""Conversion of the launcher of a job (torchrun, DeepSpeed, python and others) to torchrun, with the number of nodes and ranks."""

from __future__ import annotations

from megatron_lab.migration.launch_command import LaunchCommand, parse_argv

_NUM_NODES_FLAGS = ("nnodes", "num-nodes", "num_nodes")
"""Flags of launchers for the number of nodes."""
_RANKS_PER_NODE_FLAGS = ("nproc-per-node", "num-gpus")
"""Flags of launchers for the number of ranks per node."""
_DEFAULT_RANKS_PER_NODE = 8
"""Maximum number of ranks per node, if the source does not set it."""
_RENDEZVOUS_FLAGS = (
    "master-addr",
    "master-port",
    "node-rank",
    "rdzv-id",
    "rdzv-backend",
    "rdzv-endpoint",
    "max-restarts",
    "standalone",
)
"""Flags of torchrun that are copied for jobs with several nodes."""


def convert_launcher(command: LaunchCommand, argv: tuple[str, ...]) -> None:
    """Set the launcher of a command to torchrun, with the numbers of nodes and ranks of another launcher.

    If the other launcher does not give the number of ranks per node, the launcher of the command stays empty. A plain python
    command means one rank.

    Args:
        command: launch command of this project; its `launcher`, `world_size` and messages are updated.
        argv: the other launcher and its arguments, without the program that it starts.
    """
    parsed = [(name, values) for name, values, _ in parse_argv(list(argv[1:]))]
    values_by_name = dict(parsed)
    ranks_per_node = next((values_by_name[name][0] for name in _RANKS_PER_NODE_FLAGS if values_by_name.get(name)), None)
    num_nodes = next((values_by_name[name][0] for name in _NUM_NODES_FLAGS if values_by_name.get(name)), "1")
    launcher = argv[0].rpartition("/")[2] if argv else ""
    if launcher in ("srun", "mpirun", "mpiexec"):
        command.missing.append(
            f"the number of ranks that {launcher} starts (--world-size N of this tool). "
            "Under SLURM, a run reads its ranks from the environment"
        )
    if ranks_per_node is None:
        if launcher in ("python", "python3") and "-m" not in argv:
            command.world_size = command.world_size or 1
        return
    command.launcher = ("torchrun", "--nproc-per-node", ranks_per_node)
    if num_nodes != "1":
        command.launcher += ("--nnodes", num_nodes)
    for name, values in parsed:
        if name in _RENDEZVOUS_FLAGS and num_nodes != "1":
            command.launcher += (f"--{name}", *values)
    if ranks_per_node.isdigit() and num_nodes.isdigit():
        command.world_size = command.world_size or int(ranks_per_node) * int(num_nodes)


def set_default_launcher(command: LaunchCommand) -> None:
    """Choose the launcher of a command from the number of ranks: python for one rank, otherwise torchrun.

    All nodes get the same number of ranks, at most 8. If the number of ranks is not known, the shell variable ``$GPUS`` stands for
    it.
    """
    world_size = command.world_size
    if world_size is None:
        command.launcher = ("torchrun", "--nproc-per-node", "$GPUS")
    elif world_size == 1:
        command.launcher = ("python",)
    else:
        ranks_per_node = max(size for size in range(1, _DEFAULT_RANKS_PER_NODE + 1) if world_size % size == 0)
        command.launcher = ("torchrun", "--nproc-per-node", str(ranks_per_node))
        if world_size > ranks_per_node:
            command.launcher += ("--nnodes", str(world_size // ranks_per_node))
