"""From text to the microbatches of a step."""
