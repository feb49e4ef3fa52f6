"""From the tensors of a run to a complete checkpoint."""
