"""Where checkpoints are kept: local folders, and object stores through fsspec, behind one interface. Knows nothing of tensors."""
