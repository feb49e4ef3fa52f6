"""Everything that a user may set: dataclasses by topic, the flags and YAML made from them, and the rules between settings."""

from megatron.moved import find_moved

find_moved()
