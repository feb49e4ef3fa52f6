"""Everything around the training core `megatron`: predictions of memory and time, tests that two layouts train alike, monitoring,
restarts, conversion of checkpoints and launch scripts, checks of clusters, and benchmarks.

This package imports the core. Outside of `megatron/api`, the core has no import statement for this package: it loads the few
functions that it needs from here by name, at run time.
"""
