"""Metrics of a training run: log lines, the history file (`history.jsonl`), peak FLOP/s of devices, and timers."""

from megatron.moved import find_moved

find_moved()
