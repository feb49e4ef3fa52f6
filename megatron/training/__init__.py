"""The training step, the loop around it, evaluation, saving, resuming and exits."""
