"""Tests. A package, so that helpers are imported as `tests.support.layout` whatever the working directory."""
