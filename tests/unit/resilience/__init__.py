"""Tests of `megatron/resilience/`."""
