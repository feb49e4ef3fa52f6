"""Tests of `megatron/metrics/`."""
