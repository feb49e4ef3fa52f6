"""Checks and measurements of the nodes of a cluster and of the links between them; what failures of nodes cost."""
