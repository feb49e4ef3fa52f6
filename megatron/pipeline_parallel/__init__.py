"""Split the depth over the ranks of a pipeline group."""

from megatron.moved import find_moved

find_moved()
