"""A GPT written plainly for one process in float64: what every layout must reproduce. Shares no code with the framework."""
