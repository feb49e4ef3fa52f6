"""What the model and its schedules are, without torch. Model, counts, checks, plans and exports all read it here."""

from megatron.moved import find_moved

find_moved()
