"""Pictures of the memory of a rank over a step."""
