"""Pictures of timelines, simulated or measured: as text, figure, trace and table. Pure; times are milliseconds."""
