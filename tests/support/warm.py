"""Ranks that stay for the whole test process: for tests whose ranks only run a function of their own module."""

from __future__ import annotations

from megatron.verification.local_ranks import RankPool

run_warm_ranks = RankPool().run
