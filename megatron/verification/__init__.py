"""Whether a layout trains as one plain process does: the reference, runs at a layout on local processes, and what differs."""
