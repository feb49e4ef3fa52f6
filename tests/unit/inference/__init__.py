"""Tests of `megatron/inference/`."""
