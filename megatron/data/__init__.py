"""Turns tokens in files into the microbatches of a step: tokenizers, indexed datasets, order of samples, loader."""

from megatron.moved import find_moved

find_moved()
