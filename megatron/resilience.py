"""The former name of `megatron_lab.resilience`."""

from megatron.moved import take_place

take_place(__name__)
