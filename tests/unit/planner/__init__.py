"""Tests of `megatron_lab/planner/`."""
