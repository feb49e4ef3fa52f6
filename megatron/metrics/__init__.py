"""What a run reports of itself: FLOPs, device peaks, timers, loggers."""

from megatron.moved import find_moved

find_moved()
