"""Checks that a run makes of itself while it trains: replicas must be equal, and sums must have been made."""
