"""Tests of `megatron/config/`."""
