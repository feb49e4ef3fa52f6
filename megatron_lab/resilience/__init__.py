"""Automatic recovery from lost ranks and from loss spikes. If ranks are lost, a launcher process on each node (supervisor) restarts
them."""
