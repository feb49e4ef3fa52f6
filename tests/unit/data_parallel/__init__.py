"""Tests of `megatron/data_parallel/`."""
