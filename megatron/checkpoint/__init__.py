"""Saves global tensors to files and loads them at any layout; reads and writes checkpoints of other programs."""
