"""Copy the model over the ranks of a data group and sum its gradients."""
