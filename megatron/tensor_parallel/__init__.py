"""Split a layer over the ranks of a tensor group."""
