"""Data parallelism: replicates the model over the data-parallel ranks or shards its state over them, and reduces gradients."""

from megatron.moved import find_moved

find_moved()
