"""Tests of `megatron/optimizer/`."""
