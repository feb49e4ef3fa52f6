"""Turns text into the microbatches of a step: tokenizers, preprocessing, indexed datasets, order of samples, loader."""
