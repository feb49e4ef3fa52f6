"""Coordinate check of Yang et al. 2022: how much a model's activations change in training, by the width of the model."""
