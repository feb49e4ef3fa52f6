"""Generators of schedules, one idea a file; `registry` finds them by name."""
