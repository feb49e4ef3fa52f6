"""Context ranks share each sequence: who holds which tokens, and attention across them."""

from megatron.moved import find_moved

find_moved()
