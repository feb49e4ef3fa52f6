"""Perplexity and benchmark scores of a trained model."""
