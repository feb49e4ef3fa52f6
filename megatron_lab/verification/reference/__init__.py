"""Reference model: GPT and its training in plain code for one process in float64. Every layout must reproduce its values. It shares
no code with the framework."""
