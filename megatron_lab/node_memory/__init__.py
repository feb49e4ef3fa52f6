"""The state of a run in the memory of its nodes (--memory-save-interval), from which a job goes on without a storage."""
