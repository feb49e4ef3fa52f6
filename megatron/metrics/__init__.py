"""Metrics of a run: log lines, the run's history file, peak rates of devices, timers."""

from megatron.moved import find_moved

find_moved()
