"""One training step in float64, of transformers and here with the weights of the same folder: logits, loss, every gradient."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.config.training import OptimizerConfig
from megatron.parallel.tensor_slice import TensorSlice
from megatron_lab.foreign.huggingface.expert_families import GPT_OSS
from megatron_lab.foreign.huggingface.families import FAMILIES
from megatron_lab.foreign.huggingface.family import Family
from megatron_lab.foreign.huggingface.folder import HuggingFaceFolder
from megatron_lab.foreign.huggingface.groups import UnsupportedFields
from megatron_lab.foreign.huggingface.mixture_fields import MixtureFields
from megatron_lab.inference.forward import compute_sequence_logits
from megatron_lab.verification.observation import LocalTensor
from tests.support.covering import full_but
from tests.support.huggingface_models import BIAS_OF_CHOICES, CASES, SMALL, YARN, inputs_of, library, saved, some_ids, train_step
from tests.support.layout import keep_gradients
from tests.support.lone_rank import lone_rank

VOCAB = 131
GPT_OSS_CASE: tuple[str, dict[str, Any]] = (
    "gpt_oss",
    SMALL
    | {"head_dim": 12, "sliding_window": 6, "rope_scaling": YARN | {"truncate": False}, "rope_theta": 150000.0}
    | {"swiglu_limit": 0.7},
)


class InDoubles(TorchFunctionMode):
    """Whatever asks for float32 gets float64. transformers computes norms, softmaxes and rotary tables in float32, whatever the
    dtype of the weights is; a model that is made and run in this mode is in float64 throughout."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def in_doubles(folder: Path) -> Any:
    """The model that transformers makes of a folder, in float64."""
    transformers = library(json.loads((folder / "config.json").read_text())["model_type"])
    with InDoubles():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others have no float64
        return model


def their_step(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Logits, loss, and gradients by their names; for biases of choices, how often each expert was chosen over the mean, less 1."""
    model = in_doubles(folder)
    counts: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(module, BIAS_OF_CHOICES):

            def count(router: Any, _: Any, found: Any, name: str = name) -> None:
                each = torch.bincount(found[2].flatten(), minlength=router.num_experts).double()
                counts[f"{name}.{BIAS_OF_CHOICES}"] = each / each.mean() - 1

            module.register_forward_hook(count)
    with InDoubles():
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    return logits.detach(), loss.item(), {name: param.grad for name, param in model.named_parameters()} | counts


def our_step(folder: HuggingFaceFolder, ids: torch.Tensor) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """The same of ours: one process, one microbatch."""
    step = train_step(folder, torch.float64, OptimizerConfig(lr=0.1, optimizer="sgd"))
    kept: list[LocalTensor] = []
    keep_gradients(step, kept)
    with torch.no_grad():
        logits = compute_sequence_logits(step.model, lone_rank(), ids[:, :-1])
    result = step.run([inputs_of(ids)], iteration=1, learning_rate=0.1, weight_decay=0.0)
    return logits, result.loss, {part.name: part.values for part in kept}


ONE_OF_THEIR_KIND = (
    *("gpt2", "qwen2-tied", "stablelm", "olmo2", "granite", "gemma", "gemma2", "mixtral", "qwen2-moe", "qwen3-moe", "starcoder2"),
    *("nemotron", "olmo", "arcee", "seed-oss", "ministral", "ministral3", "glm", "glm4", "ernie4-5"),
)
NORMAL = (*ONE_OF_THEIR_KIND, "deepseek-v3-experts")
"""Without --full. Of architectures with several cases test_huggingface_models.py has those that differ most."""


@pytest.mark.parametrize("case", full_but(NORMAL, CASES, "logits of this kind in test_huggingface_models.py"))
def test_a_step_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    check_step(case, tmp_path)


def check_step(case: str, tmp_path: Path) -> None:
    saved(case, tmp_path, vocab_size=VOCAB)
    ids = some_ids(VOCAB, (2, 41))
    logits, loss, gradients = their_step(tmp_path, ids)
    folder = HuggingFaceFolder(tmp_path)
    found_logits, found_loss, found = our_step(folder, ids)
    torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-10)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    family = FAMILIES[CASES[case][0]]
    gradients = {family.aliases.get(name, name): values for name, values in gradients.items()}
    gradients = dict(each for item in gradients.items() for each in _of_experts(*item, family))
    for name, layout in family.build_layouts(folder.model, VOCAB).items():
        expected = layout.read_param(TensorSlice.full(layout.shape), torch.float64, gradients.__getitem__)
        assert torch.allclose(found[name], expected, rtol=1e-9, atol=1e-12) and expected.abs().max() > 0, name


def _of_experts(name: str, values: torch.Tensor, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of single experts, under the names that files have for them: in memory transformers keeps them together."""
    if not name.endswith((".mlp.gate.weight", ".experts.gate_up_proj", ".experts.down_proj")):
        yield name, values
        return
    layer, _, which = name.rpartition(".mlp.")
    part = {"gate.weight": "mlp.router", "experts.gate_up_proj": "mlp.experts.up", "experts.down_proj": "mlp.experts.down"}[which]
    theirs = family.module_names[part].split()
    if part == "mlp.router":
        yield f"{layer}.{theirs[0]}.weight", values
        return
    for expert, matrix in enumerate(values):
        for module, half in zip(theirs, matrix.chunk(len(theirs)), strict=True):
            yield f"{layer}.{module.format(expert)}.weight", half


class _DenseMLP(torch.nn.Module):
    """One MLP with GPT-OSS's activation in the place of its experts, with Llama's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (torch.nn.Linear(*sizes, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(*sizes[::-1], bias=False)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        halves = torch.stack((self.gate_proj(x), self.up_proj(x)), dim=-1)
        return self.down_proj(GptOssExperts._apply_gate(self, halves.flatten(-2))), None  # type: ignore[arg-type]


def test_a_step_of_gpt_oss_without_its_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sinks, windows in every second layer, YaRN without rounding, biases of attention alone, and the activation with its limit."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    monkeypatch.setattr(modeling, "GptOssMLP", _DenseMLP)
    groups = tuple(group for group in GPT_OSS.field_groups if not isinstance(group, UnsupportedFields | MixtureFields))
    ignored = (*GPT_OSS.ignored_fields, "num_local_experts", "num_experts_per_tok")
    monkeypatch.setitem(FAMILIES, "gpt_oss", dataclasses.replace(GPT_OSS, field_groups=groups, ignored_fields=ignored))
    monkeypatch.setitem(CASES, "gpt_oss", GPT_OSS_CASE)
    check_step("gpt_oss", tmp_path)
