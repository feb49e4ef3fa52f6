"""Planner: predicts memory, communication, pipeline idle time and step duration of a training job before it is launched. It
allocates no device memory and communicates with no other process."""
