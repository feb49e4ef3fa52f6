"""Compare what was observed, in the order of cause: what differs first, where, and what kind of fault that is."""
