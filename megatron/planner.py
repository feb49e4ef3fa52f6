"""The former name of `megatron_lab.planner`."""

from megatron.moved import take_place

take_place(__name__)
