"""Small models with published configurations: imported, trained, exported, each time with the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lab.foreign.huggingface.families import CONVERTIBLE
from tests.support.covering import full_but
from tests.support.published_configs import CLOSE, prove, published

MODELS = published()
FIRST = {model.config["model_type"]: name for name, model in reversed(MODELS.items())}
"""Of each family, the first model of the file."""
NORMAL = (*FIRST.values(), "Phi-4-mini", "Gemma 2 9B", "Gemma 3 270M")


def test_every_family_has_a_published_model() -> None:
    assert FIRST.keys() == set(CONVERTIBLE)


@pytest.mark.parametrize("name", full_but(NORMAL, MODELS, "another published model of the family"))
def test_a_small_model_with_published_fields_goes_both_ways(name: str, tmp_path: Path) -> None:
    proof = prove(MODELS[name].config, tmp_path)
    assert proof.imported <= CLOSE and proof.exported <= CLOSE
    assert proof.losses[1] < proof.losses[0]
