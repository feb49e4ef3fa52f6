"""Optional features that observe a training run: reports of memory, predicted step times and compilations, profiles, warnings and
pictures.

A feature is imported only if it is enabled.
"""
