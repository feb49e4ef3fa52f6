"""Proof that a run at a layout (any combination of parallel axes) trains as one process does: a reference model, runs on local
processes, and the comparison of both."""
