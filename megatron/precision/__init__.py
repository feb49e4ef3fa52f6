"""What the products of linear layers are computed in: the model's own dtype, or formats of 8 bits with scales."""

from megatron.moved import find_moved

find_moved()
