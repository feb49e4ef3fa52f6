"""Former name of the package `megatron_lab.flight`. Importing this name returns the package, with a DeprecationWarning."""

from megatron.moved import take_place

take_place(__name__)
