"""Pictures of timelines, simulated or measured: as text, figure, trace and table. Torch is not needed; times are milliseconds."""
