"""Indexes of large datasets, kept in files."""
