"""A check of how activations grow with the width of a model."""
