"""Saves global tensors to files and loads them at any layout."""
