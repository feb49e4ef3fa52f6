"""Proofs of a user's layout: settings made small, run and compared, and what was found in words."""
