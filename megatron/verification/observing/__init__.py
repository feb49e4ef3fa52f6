"""Run settings at a layout on local processes, and plainly in one, and keep everything that can be compared."""
