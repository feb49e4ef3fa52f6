"""Tests of `megatron/training/`."""
