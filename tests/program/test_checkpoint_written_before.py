"""Checkpoints that an earlier commit has written load bit for bit, at their own layout and at another; training goes on as it did.

The files in tests/support/written_before/checkpoints/ were written by commit 191c503 and are never made anew: that is their use.
`expected.json` holds what that commit's program said of them: the digest of every tensor, and losses, gradient norms and the last
checkpoint of four more steps on one rank and on two.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.global_tensor import get_tensor_bytes
from megatron.checkpoint.storage_url import open_storage
from megatron_lab.checkpoints.verification import verify_checkpoint
from megatron_lab.foreign.source import StoredCheckpoint
from tests.support.equality import number_differences
from tests.support.runs import arguments, checkpoint, losses, read_metrics, run

FOLDER = Path(__file__).parents[1] / "support" / "written_before" / "checkpoints"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SAVED, STEPS = 4, 8

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "lr_decay_iters": STEPS,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "min_lr": 1e-3,
    "train_iters": STEPS,
    "save_interval": STEPS,
}
MODELS: dict[str, dict[str, Any]] = {
    "bf16_sharded": {"bf16": True, "use_distributed_optimizer": True},
    "fp32_tensor_parallel": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "untie_embeddings_and_output_weights": True,
    },
}
ON_TWO = {"fp32_tensor_parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
"""The other one has two data ranks."""


def test_every_tensor_is_read_bit_for_bit() -> None:
    for name, expected in EXPECTED["runs"].items():
        path = checkpoint(FOLDER / name, SAVED)
        stored = StoredCheckpoint(path)
        found = {tensor: hashlib.sha256(get_tensor_bytes(stored.read_stored(tensor))).hexdigest()[:16] for tensor in stored.tensors}
        assert found == expected["tensors"], name
        checked = verify_checkpoint(open_storage(path))
        assert (checked.content_digest, checked.problems) == (expected["content_digest"], ()), name


def test_training_goes_on_as_it_did(tmp_path: Path) -> None:
    """Within rounding: matrix libraries differ, an embedding's gradient is now added row by row, and where a CPU has no units for
    bfloat16 products, these are now computed in float32."""
    for name, settings in MODELS.items():
        tolerance = 1e-5 if name.startswith("fp32") else 1e-2
        for ranks, layout in ((1, {}), (2, ON_TWO.get(name, {}))):
            expected, save = EXPECTED["runs"][name]["continued_on"][str(ranks)], tmp_path / f"{name}-{ranks}"
            metrics = tmp_path / f"{name}-{ranks}.jsonl"
            run(arguments(**SHAPE | settings | layout, load=FOLDER / name, save=save, metrics_file=metrics), ranks)
            norms = [line["grad_norm"] for line in read_metrics(metrics) if "grad_norm" in line]
            problems = number_differences("losses", losses(metrics), expected["losses"], tolerance)
            problems += number_differences("norms", norms, expected["grad_norms"], tolerance)
            assert not problems, f"{name} on {ranks} ranks: {problems}"
