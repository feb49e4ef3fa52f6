"""Mutation testing: change one thing in the source of the core, and see whether its tests notice."""
