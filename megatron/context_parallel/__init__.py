"""Context parallelism: attention for sequences whose tokens are split over several ranks."""

from megatron.moved import find_moved

find_moved()
