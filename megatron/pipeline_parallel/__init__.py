"""Split the depth over the ranks of a pipeline group."""
