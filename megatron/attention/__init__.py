"""Attention itself, between the layers that make queries, keys and values and the one that joins the heads."""
