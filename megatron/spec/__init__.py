"""Specifications of the model's layers, parameters and pipeline schedules, without a dependency on torch.

The model, parameter and FLOP counts, checks of the settings, the planner and exports all read these specifications.
"""

from megatron.moved import find_moved

find_moved()
