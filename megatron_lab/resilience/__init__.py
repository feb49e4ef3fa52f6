"""Recovery without intervention of the user: from lost ranks, by a supervisor on each node that restarts ranks in place, and from
loss spikes."""
