"""Which dataset each sample comes from."""
