"""Pictures and tables of pipeline schedules."""
