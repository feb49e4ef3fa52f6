"""Pages of HTML: the report of a run, and a plan."""
