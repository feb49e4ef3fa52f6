"""Where the chunks of a model lie: position on the pipeline axis of each chunk, in the order of the depth."""

from __future__ import annotations


def loop(num_stages: int, chunks_per_stage: int = 1) -> tuple[int, ...]:
    """Round and round: chunk c lies on stage c mod p (Narayanan et al. 2021, section 2.2.2)."""
    return tuple(range(num_stages)) * chunks_per_stage


def v_shape(num_stages: int) -> tuple[int, ...]:
    """Down and up again: first and last chunk share stage 0 (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory")."""
    return (*range(num_stages), *reversed(range(num_stages)))
