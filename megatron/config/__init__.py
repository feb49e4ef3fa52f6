"""Settings of a run: dataclasses by topic, the flags and YAML keys that are generated from them, and the rules that check them."""

from megatron.moved import find_moved

find_moved()
