"""Proofs that a user's layout trains as one process does: the settings are reduced to a small run, and the small run is compared
with a reference run. If the two differ, the cause is searched for."""
