"""The files of a checkpoint: names, headers, manifest, checksums. Nothing here imports torch."""
