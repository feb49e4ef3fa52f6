"""Programs of the command line. `python -m megatron_lab NAME` runs one of them; a checkout has a script for each in `tools/`."""
