"""Proves that a layout trains as one plain process does: a reference, runs at a layout on local processes, their comparison."""
