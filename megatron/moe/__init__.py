"""Mixtures of experts: expert selection, load balancing, token dispatch and grouped linear layers. docs/moe.md has the
definitions."""

from megatron.moved import find_moved

find_moved()
