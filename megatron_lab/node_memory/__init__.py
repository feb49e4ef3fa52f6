"""Checkpoints in the host memory of a job's nodes (--memory-save-interval). A restarted job continues from them without reading the
storage."""
