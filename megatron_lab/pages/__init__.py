"""HTML pages (the report of a run, and a plan), and the texts of --help and --explain."""
