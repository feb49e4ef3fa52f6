"""Checks that a run makes on itself during training: replicas of weights are equal, and gradients are summed over all ranks."""
