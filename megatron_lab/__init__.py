"""Everything around the training core `megatron`: plans, proofs, monitoring, restarts, conversion, checks and benchmarks.

This package imports the core; the core never imports it.
"""
