"""What every rank does at any moment, and who keeps the others waiting (docs/hangs.md)."""
