"""The proof for what is done with activations: computed again, moved, or made by compiled layers. No bit changes by it.

That such a run trains as one plain process does is proved in `test_layouts.py`. `--full` compares the bits of every case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.memory import MemoryConfig
from megatron_lab.verification.reference.shape import ReferenceShape
from tests.layouts.case import layout_of, recipe_of
from tests.layouts.features import FEATURES
from tests.support.covering import Case
from tests.support.equality import assert_same_bits
from tests.support.layout import Layout, LayoutRun, run_layout

RUNS: list[dict[str, Any]] = [
    {"pp": 2, "style": "gpt2", "tied": True},
    {"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "tied": True, "documents": "all"},
    {"dp": 2, "sharding": "optim_grads", "style": "gpt2", "documents": "all"},
    {"loss_chunk": 4, "compiled": True, "style": "gpt2", "documents": "all"},
    {"dp": 2, "sharding": "optim_grads_params"},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "loss_chunk": 4, "style": "gpt2", "tied": True},
    {"tp": 2, "sequence_parallel": "overlapping", "tied": True, "documents": "all"},
]
"""Runs of every kind, which the memory settings go with in turn."""


PLAIN_RUNS: dict[tuple[ReferenceShape, Layout, Any], LayoutRun] = {}
"""Runs that keep all activations, by the model, the layout and the documents: several cases are compared with each."""


def chosen() -> list[Case]:
    """Every memory setting in one run, or one of the kind that it is made for."""
    feature = FEATURES["memory"]
    cases = []
    for i, memory in enumerate(feature.axes["memory"]):
        runs = [feature.case([memory, run]) for run in RUNS]
        cases.append(next(case for case in runs[i % 7 :] + runs[: i % 7] if feature.runs(case)))
    return cases


def name(case: Case) -> str:
    words = [f"{axis}{case[axis]}" for axis in ("tp", "pp", "dp")]
    words += [str(case[axis]) for axis in ("memory", "schedule", "style", "sharding", "documents", "sequence_parallel")]
    return "-".join([*words, f"tied{case['tied']}", f"loss{case['loss_chunk']}", *(["compiled"] if case["compiled"] else [])])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [*FEATURES["memory"].cases()] if metafunc.config.getoption("--full") else chosen()
        metafunc.parametrize("case", cases, ids=name)


def test_what_is_done_with_activations_changes_no_bit(case: Case) -> None:
    # Attention within documents is not traced. Of a layer cut there the three parts of the residual stream's gradient, two of which
    # are an RMSNorm's, are summed in another order.
    if case["compiled"] and case["style"] == "llama" and case["documents"]:
        return
    recipe, layout = recipe_of(case), layout_of(case)
    plain = replace(layout, memory=MemoryConfig(loss_chunk_tokens=case["loss_chunk"]), compiler=None)
    key = recipe.shape, plain, case["documents"]
    if key not in PLAIN_RUNS:
        PLAIN_RUNS[key] = run_layout(recipe, plain)
    assert_same_bits(run_layout(recipe, layout), PLAIN_RUNS[key])
