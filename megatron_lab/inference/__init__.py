"""Inference with a trained model: logits of complete sequences, and text generation."""
