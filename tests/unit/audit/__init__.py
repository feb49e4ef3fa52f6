"""Tests of `megatron_lab/audit/`."""
