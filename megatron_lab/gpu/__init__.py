"""Checks and profiles of a GPU."""
