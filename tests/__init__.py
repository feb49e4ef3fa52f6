"""Tests. A package, so that helpers are imported as `tests.distributed` whatever the working directory."""
