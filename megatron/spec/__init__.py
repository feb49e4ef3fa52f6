"""What the model and its schedules are, without torch: every fact once, for whoever builds, counts, checks, plans or converts."""
