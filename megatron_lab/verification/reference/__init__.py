"""Reference model: GPT and its training in plain code for one process in float64. A parallel run of the framework must reproduce
its values. It shares no code with the framework."""
