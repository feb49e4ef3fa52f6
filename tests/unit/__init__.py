"""What needs no process: functions and files, by the folder of `megatron/` that they test."""
