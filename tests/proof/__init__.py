"""What several forked ranks compute, compared with one process, with plain references, or with the plan."""
