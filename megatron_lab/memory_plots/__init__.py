"""Plots of the memory that a rank uses over the course of a training step."""
