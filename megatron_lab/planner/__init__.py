"""Planner: predicts memory, communication, idle time and duration of a job before it is launched. It allocates no device memory and
sends nothing."""
