"""Tests. A package, so that helpers are imported as `tests.layout` whatever the working directory."""
