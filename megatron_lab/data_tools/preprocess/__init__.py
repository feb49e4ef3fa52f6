"""Turns text into indexed datasets: inputs are cut into shards, any number of workers make part files of them, these are joined."""
