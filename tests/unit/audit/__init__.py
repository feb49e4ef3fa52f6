"""Tests of `megatron/audit/`."""
