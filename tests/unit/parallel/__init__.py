"""Tests of `megatron/parallel/`."""
