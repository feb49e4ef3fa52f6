"""Checks and measurements of the nodes of a cluster and of the links between them, and a simulation of the training time that node
failures cost."""
