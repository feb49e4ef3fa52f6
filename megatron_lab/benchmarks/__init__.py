"""Measurements of speed and memory, each with what it is compared with."""
