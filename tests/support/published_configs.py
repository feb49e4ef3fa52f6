"""Published config.json files (tests/data/published_configs.json), and small random models of which all other fields are published.

``python -m tests.support.published_configs`` prints what is proven of each model, as a table.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.config.model import ModelConfig
from megatron.config.training import OptimizerConfig
from megatron_lab.checkpoints.huggingface_writer import export
from megatron_lab.foreign.huggingface.families import FAMILIES
from megatron_lab.foreign.huggingface.fields import Fields
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.inference.model_from_source import load_model
from megatron_lab.verification.recording import record_params
from tests.support.cli import ROOT
from tests.support.huggingface_models import inputs_of, library, logits, opened, random_model, some_ids, train_step
from tests.support.lone_rank import lone_rank
from tests.support.memory_source import MemorySource

VOCAB, WINDOW = 128, 8
CLOSE = 1e-5
"""Of logits of about 5 in float32."""
_SMALL: dict[str, int] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    n_embd=64,
    intermediate_size=96,
    num_attention_heads=4,
    n_head=4,
    head_dim=16,
    kv_channels=16,
    n_positions=64,
    n_ctx=64,
    sliding_window=WINDOW,
    sliding_window_size=WINDOW,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=16,
    n_routed_experts=16,
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=48,
)
"""Sizes that replace published ones, where the file has them."""
_LEFT_OUT = ("quantization_config",)
"""What would describe other files than those of the small model."""


class Published(NamedTuple):
    """What a model is published with. The number of parameters is None where it was not found with certainty."""

    config: dict[str, Any]
    parameters: int | None


def published() -> dict[str, Published]:
    """The published models by their names."""
    content = json.loads((ROOT / "tests/data/published_configs.json").read_text())
    return {name: Published(entry["config"], entry["parameters"]) for name, entry in content.items()}


def read_config(config: dict[str, Any]) -> tuple[ModelConfig, list[str]]:
    """The model that a config.json describes, and the notes of the import."""
    family = FAMILIES[config["model_type"]]
    fields = Fields("config.json", config, (*family.ignored_fields, "quantization_config"))
    fields.get_size("vocab_size")
    model = family.parse(fields)
    fields.finish()
    return model, fields.notes


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A published configuration with small sizes and special tokens in the small vocabulary; every other field is as published."""
    small = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    small |= {name: value for name, value in _SMALL.items() if small.get(name) is not None}
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    interval = max((config.get(name) or 0 for name in ("sliding_window_pattern", "_sliding_window_pattern")), default=0)
    small[depth] = interval or (4 if "layer_types" in config or "no_rope_layers" in config else 2)
    for name in ("layer_types", "no_rope_layers"):
        if name in small:
            small[name] = config[name][: small[depth]]
    if (heads := config.get("num_key_value_heads")) is not None:
        small["num_key_value_heads"] = 4 if heads == config["num_attention_heads"] else min(heads, 2)
    for name, value in small.items():
        if name.endswith("_token_id") and value is not None:
            small[name] = [id % VOCAB for id in value] if isinstance(value, list) else value if value < 0 else value % VOCAB
    if isinstance(scaling := small.get("rope_scaling"), dict):
        rotated = 16 * small.get("partial_rotary_factor", 1)
        factors = {name: scaling[name][: int(rotated) // 2] for name in ("short_factor", "long_factor") if name in scaling}
        small["rope_scaling"] = scaling | factors
    return small


class Proof(NamedTuple):
    """What is proven of a small model. The distances are the greatest of logits here from those of transformers."""

    imported: float
    """After the import."""
    losses: tuple[float, ...]
    """Of the training steps, on the same tokens."""
    exported: float
    """After the steps, of the model that transformers opens."""


def prove(config: dict[str, Any], folder: Path) -> Proof:
    """Import a random model of transformers with the shrunk configuration, train two steps, export, and compare logits."""
    transformers, small = library(config["model_type"]), shrunk(config)
    theirs_folder = folder / "theirs"
    theirs_folder.mkdir(parents=True)
    (theirs_folder / "config.json").write_text(json.dumps(small))
    torch.manual_seed(1)
    theirs = random_model(transformers.AutoConfig.from_pretrained(theirs_folder))
    theirs.save_pretrained(theirs_folder)
    (theirs_folder / "config.json").write_text(json.dumps(small))  # as it is published, not as transformers writes it

    source, ids = HuggingFaceFolder(theirs_folder), some_ids(VOCAB, (2, 25))
    imported = _distance(_our_logits(source, ids), logits(theirs, ids))
    step = train_step(source, torch.float32, OptimizerConfig(lr=1e-2, optimizer="adam"))
    losses = tuple(
        step.run([inputs_of(ids)], iteration=iteration, learning_rate=1e-2, weight_decay=0.0).loss for iteration in (1, 2)
    )
    trained = MemorySource(source.model, {part.name: part.values.clone() for part in record_params(step)})
    export(trained, folder / "back", family=config["model_type"])
    return Proof(imported, losses, _distance(_our_logits(trained, ids), logits(opened(folder / "back"), ids)))


def _our_logits(source: Any, ids: torch.Tensor) -> torch.Tensor:
    context = lone_rank()
    return compute_sequence_logits(load_model(source, context, torch.float32), context, ids)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().max() > 0.5, "logits that say nothing"
    return (found - expected).abs().max().item()


def _rows() -> Iterator[str]:
    row = "{:<14} {:<30} {:>17} {:>9} {:>9} {:>9}"
    yield row.format("family", "published configuration", "parameters", "imported", "trained", "exported")
    for name, model in published().items():
        with tempfile.TemporaryDirectory() as folder:
            proof = prove(model.config, Path(folder))
        steps = f"-{proof.losses[0] - proof.losses[1]:.3f}"
        count = "not known" if model.parameters is None else f"{model.parameters:,}"
        yield row.format(model.config["model_type"], name, count, f"{proof.imported:.0e}", steps, f"{proof.exported:.0e}")


if __name__ == "__main__":
    for line in _rows():
        print(line, flush=True)
