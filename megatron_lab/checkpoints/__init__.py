"""Subcommands of `tools/checkpoint.py`: inspect, compare, verify, reshard, import and export checkpoints."""
