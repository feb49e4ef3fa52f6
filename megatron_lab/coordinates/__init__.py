"""Coordinate check: how the change of a model's activations during training depends on the width of the model."""
