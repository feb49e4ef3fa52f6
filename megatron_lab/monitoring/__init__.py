"""Optional features that observe a run: reports of memory, plan and compiler, profiles, warnings and pictures. A feature is
imported only if it is enabled."""
