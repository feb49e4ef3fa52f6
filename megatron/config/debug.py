"""Checks that a run makes of itself, and what it writes down to be compared with another."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.setting import GIVEN, acts_with, setting


@dataclass(frozen=True)
class DebugConfig:
    """Comparison of replicas, an audit of the first step, and the trace of a run."""

    check_replicas_every: int | None = setting(None, at_least=1, unit="steps")
    """Steps between comparisons of the parameters that must be equal on several tensor or data ranks; a difference in any bit ends
    the run. The first step that makes an update is audited too: every parameter has a gradient, summed over the right ranks and
    counted once in the norm."""
    save_trace: str | None = None
    """Write a trace of the run to this file: for each step the loss, and of each parameter the norm and a signature of gradient and
    weight, the same at every layout. tools/verify_layout.py finds where two runs part."""
    trace_steps: int = setting(10, at_least=1, unit="steps", acts=acts_with(save_trace=GIVEN))
    """Steps that --save-trace records, from the first one of this start on."""
