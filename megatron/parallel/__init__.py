"""Rank arithmetic, process groups, collectives, parameter records, shards, random numbers."""
