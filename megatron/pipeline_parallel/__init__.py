"""Pipeline parallelism: layers split over the ranks of a pipeline group. `megatron/spec/schedules.py` defines the schedules."""

from megatron.moved import find_moved

find_moved()
