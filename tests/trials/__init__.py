"""Programs that are run by hand for as long as one likes: random command lines, kills, flipped bits, runs without any fault.

Tests run a few of their trials; figures in the documents come from long runs.
"""
