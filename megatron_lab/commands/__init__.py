"""The programs behind `tools/*.py`: `python -m megatron_lab NAME` runs one."""
