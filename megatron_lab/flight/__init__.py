"""Hang detection. Every rank keeps a record of its current activity, from which a watcher process finds the rank that keeps the
others waiting (docs/hangs.md)."""
