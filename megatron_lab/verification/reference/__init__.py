"""A GPT and its training, written plainly for one process in float64: every layout must reproduce it. It shares no code with it."""
