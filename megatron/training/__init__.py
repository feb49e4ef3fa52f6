"""Training run: training step, training loop, evaluation, saving and resuming, and the handling of failures and exit signals."""

from megatron.moved import find_moved

find_moved()
