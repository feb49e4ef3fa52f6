"""A GPT and its training written plainly for one process in float64: what every layout must reproduce. Shares no code with it."""
