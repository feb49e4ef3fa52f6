"""Pipeline parallelism: the layers of the model are split over pipeline stages, and each stage runs the operations of a schedule.
`megatron/spec/schedules.py` defines the schedules."""

from megatron.moved import find_moved

find_moved()
