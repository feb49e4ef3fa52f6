"""What a run reports of itself: FLOPs, device peaks, timers, loggers."""
