"""Optional parts of a run, each imported where its flag asks for it: reports of memory, plan and compiler, profiles, pictures."""
