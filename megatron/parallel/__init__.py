"""Basis of all kinds of parallelism: rank arithmetic, process groups, collectives, matrix products, random seeds, and the
parameters of a rank with the elements that the rank updates."""

from megatron.moved import find_moved

find_moved()
