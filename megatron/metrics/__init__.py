"""What a run tells of itself: FLOPs, device peaks, timers, loggers."""
