"""Benchmarks of the framework's speed and memory. `tools/bench.py` runs them."""
