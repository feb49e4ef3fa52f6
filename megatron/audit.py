"""The former name of `megatron_lab.audit`."""

from megatron.moved import take_place

take_place(__name__)
