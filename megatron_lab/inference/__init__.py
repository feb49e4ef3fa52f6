"""Uses a trained model: logits of whole sequences, and generated text."""
