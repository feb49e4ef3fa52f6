"""From text to indexed datasets: inputs -> shards -> part files, made by any number of workers -> joined."""
