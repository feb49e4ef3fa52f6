"""What a microbatch keeps between forward and backward, where it is not simply what autograd saves."""

from megatron.moved import find_moved

find_moved()
