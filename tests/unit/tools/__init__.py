"""Tests of what `tools/` share."""
