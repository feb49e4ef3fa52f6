"""Updates shards: main parameters and moments, update rules, loss scale, sums of squares for clipping."""

from megatron.moved import find_moved

find_moved()
