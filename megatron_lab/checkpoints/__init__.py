"""What `tools/checkpoint.py` does with checkpoints: inspect, compare, verify, reshard, import and export."""
