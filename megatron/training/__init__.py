"""Training step, training loop, evaluation, saving, resuming and exits."""

from megatron.moved import find_moved

find_moved()
