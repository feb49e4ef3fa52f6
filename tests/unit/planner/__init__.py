"""Tests of `megatron/planner/`."""
