"""Where two traces part, which runs have saved."""
