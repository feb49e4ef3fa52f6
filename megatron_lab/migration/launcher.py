"""The number of ranks that a launcher was asked for, and the same in torchrun's words."""

from __future__ import annotations

from megatron_lab.migration.line import Line, words_of

_NODES = ("nnodes", "num-nodes", "num_nodes")
_RANKS = ("nproc-per-node", "num-gpus")
_PER_NODE = 8
"""Ranks of a node, where nothing says it."""
_WHERE = ("master-addr", "master-port", "node-rank", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "max-restarts", "standalone")


def put_launcher(line: Line, words: tuple[str, ...]) -> None:
    """Put torchrun in front of the line, with the ranks of these words of a launcher."""
    flags = [(name, values) for name, values, _ in words_of(list(words[1:]))]
    known = dict(flags)
    per_node = next((known[name][0] for name in _RANKS if known.get(name)), None)
    nodes = next((known[name][0] for name in _NODES if known.get(name)), "1")
    launcher = words[0].rpartition("/")[2] if words else ""
    if launcher in ("srun", "mpirun", "mpiexec"):
        line.missing.append(
            f"how many ranks {launcher} starts: --world-size N of this tool. Ranks of SLURM are found by themselves"
        )
    if per_node is None:
        if launcher in ("python", "python3") and "-m" not in words:
            line.world_size = line.world_size or 1
        return
    line.launcher = ("torchrun", "--nproc-per-node", per_node)
    if nodes != "1":
        line.launcher += ("--nnodes", nodes)
    for name, values in flags:
        if name in _WHERE and nodes != "1":
            line.launcher += (f"--{name}", *values)
    if per_node.isdigit() and nodes.isdigit():
        line.world_size = line.world_size or int(per_node) * int(nodes)


def put_torchrun(line: Line) -> None:
    """Put a launcher in front of a line whose number of ranks is known, or not."""
    ranks = line.world_size
    if ranks is None:
        line.launcher = ("torchrun", "--nproc-per-node", "$GPUS")
    elif ranks == 1:
        line.launcher = ("python",)
    else:
        per_node = max(size for size in range(1, _PER_NODE + 1) if ranks % size == 0)
        line.launcher = ("torchrun", "--nproc-per-node", str(per_node))
        if ranks > per_node:
            line.launcher += ("--nnodes", str(ranks // per_node))
