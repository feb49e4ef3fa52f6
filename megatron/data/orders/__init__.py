"""Which sample comes when: the order of one dataset, epoch by epoch or as Megatron-LM has it."""
