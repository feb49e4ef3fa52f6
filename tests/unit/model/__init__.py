"""Tests of `megatron/model/`."""
