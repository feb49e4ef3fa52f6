"""Tests of `megatron_lab/inference/`."""
