"""Tests of `megatron_lab/resilience/`."""
