"""Tests of `megatron/checkpoint/`."""
