"""Tests of `megatron/pipeline_parallel/`."""
