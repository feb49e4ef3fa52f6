"""Checkpoints in the host memory of a job's nodes (--memory-save-interval). A restarted job continues from these checkpoints
without reading the save folder."""
