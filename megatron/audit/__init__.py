"""What a run checks of itself while it goes: replicas that must be equal, sums that must have been made."""
