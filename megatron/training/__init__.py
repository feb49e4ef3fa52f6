"""The step, the loop around it, evaluation and exits."""
