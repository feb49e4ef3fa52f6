"""Updates shards: main parameters, loss scale, clipping, schedules of learning rate and weight decay."""

from megatron.moved import find_moved

find_moved()
