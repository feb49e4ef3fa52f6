"""Tests of `megatron_lab/verification/`."""
