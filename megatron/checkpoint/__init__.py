"""Global tensors to files and back."""
