"""Tests of `megatron/spec/`."""
