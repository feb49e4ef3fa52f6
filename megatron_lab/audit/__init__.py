"""Checks that a training run makes on itself: copies of weights are equal, gradients are summed over the right ranks, and devices
compute the same results twice. The package also writes traces, by which runs are compared."""
