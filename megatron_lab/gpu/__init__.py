"""Checks and profiles that test this framework on a GPU (`tools/check_gpu.py`)."""
