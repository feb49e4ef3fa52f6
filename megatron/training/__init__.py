"""The training step, the loop around it, evaluation, saving, resuming and exits."""

from megatron.moved import find_moved

find_moved()
