"""What activations take at the peak of a step, and what tensor and pipeline groups send: the real chunk, run without memory."""
