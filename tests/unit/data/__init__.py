"""Tests of `megatron/data/`."""
