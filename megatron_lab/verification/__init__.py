"""Tests that a parallel run (any combination of tensor, context, data, expert and pipeline parallelism) trains as one process does.
The parallel run uses local processes. It is compared with a reference model, which trains in one process."""
