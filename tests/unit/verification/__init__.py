"""Tests of `megatron/verification/`."""
