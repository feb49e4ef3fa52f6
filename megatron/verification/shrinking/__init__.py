"""Make a user's settings small enough to be proved in a minute, keeping what matters of the layout."""
