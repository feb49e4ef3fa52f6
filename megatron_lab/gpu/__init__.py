"""Checks and profiles that test this framework on a GPU, run by `tools/check_gpu.py`."""
