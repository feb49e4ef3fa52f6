"""Proofs that a user's layout trains as one process does. The settings are reduced to a small run on this machine, and the run is
compared with a reference run in one process. If the two runs differ, the cause is searched for."""
