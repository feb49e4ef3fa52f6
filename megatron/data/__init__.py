"""Tokenizers, indexed datasets, the order of samples, and the loader that reads the microbatches of a step."""

from megatron.moved import find_moved

find_moved()
