"""Use a trained model: logits of whole sequences, and text."""
