"""From a checkpoint into the tensors of a run, at any layout."""
