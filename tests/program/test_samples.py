"""Samples during training: the same texts at every layout, which change nothing in the training, and what refuses or ends them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.tensor import DTensor

from megatron.config.cli import load
from megatron.config.data import DataConfig
from megatron.config.outputs import LoggingConfig
from megatron.data.tokenizer import ByteTokenizer
from megatron.metrics.history import HISTORY_FILE, read_history
from megatron_lab.data_tools.sample_prompts import DEFAULT_PROMPTS, load_prompts
from megatron_lab.inference import training_samples
from megatron_lab.inference.generate import Sampling
from megatron_lab.inference.language_model import LanguageModel
from megatron_lab.monitoring.text_samples import Sample, SampleCallback
from tests.program.test_run_spikes import BAD, REWINDS, bad_batches
from tests.program.test_run_spikes import STEPS as REWIND_STEPS
from tests.support.cli import ROOT
from tests.support.covering import full_but
from tests.support.runs import arguments, complete_checkpoints, digest, launch, report, run, timeless

STEPS = 3
PROMPTS = ["1 2 3", "7", "5 9 2 44 0 13 8 8", "59", "8 8 8 8 8 8 8 8 8"]
"""Of the last one, most tokens want the same experts."""
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_expert_capacity_factor": 1.0,
    "init_method_std": 0.3,
}
EP2 = {"expert_model_parallel_size": 2}
FSDP = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
VIRTUAL = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"qk_clip": True, "qk_clip_threshold": 0.001},
    "four layers": {"num_layers": 4},
    "rope, several predictions": {
        "position_embedding_type": "rope",
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": True,
        "log_max_attention_logit": True,
    },
    "experts": EXPERTS,
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor, sequence parallel, optim, overlap": (
        "plain",
        4,
        {**TP2, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "tensor without sequence parallel, context": ("plain", 4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "zb-v": ("four layers", 4, {**VIRTUAL, "pipeline_schedule": "zb-v"}),
    "interleaved, context": ("four layers", 4, {**VIRTUAL, "context_parallel_size": 2}),
    "fully_shard, context": ("rope, several predictions", 4, {**FSDP, "context_parallel_size": 2, "fsdp_shard_size": 2}),
    "fully_shard, sequence parallel, gathered once": (
        "rope, several predictions",
        4,
        {**FSDP, **TP2, "fsdp_reshard_after_forward": "never"},
    ),
    "fully_shard, stages": ("plain", 4, {**FSDP, **PP2}),
    "tensor, context, sequence parallel, stages": ("plain", 8, {**TP2, **PP2, "context_parallel_size": 2}),
    "experts over some data ranks": ("experts", 4, EP2),
    "experts, fully_shard, sequence parallel": ("experts", 4, {**EP2, **TP2, **FSDP}),
}
QUICK = (
    "tensor, sequence parallel, optim, overlap",
    "zb-v",
    "fully_shard, context",
    "fully_shard, sequence parallel, gathered once",
    "experts over some data ranks",
)


def sampled(folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a run with greedy samples of the prompts every second step, and a checkpoint at the end."""
    file = folder.parent / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return {
        "train_iters": STEPS,
        "fp64": True,
        "save": folder,
        "metrics_file": folder / "metrics",
        "sample_interval": 2,
        "sample_prompts": file,
        "sample_tokens": 6,
        "sample_temperature": 0,
        **settings,
    }


def without_samples(folder: Path, **settings: Any) -> dict[str, Any]:
    """The same settings without samples."""
    return {name: value for name, value in sampled(folder, **settings).items() if not name.startswith("sample_")}


def texts(folder: Path) -> list[tuple[int, list[tuple[str, str]]]]:
    """Iteration, and prompt and text of each sample, as the record of the run tells."""
    return [
        (line["iteration"], [(sample["prompt"], sample["text"]) for sample in line["samples"]])
        for line in read_history(folder).samples
    ]


def checks_shards(rank: int) -> None:
    """For `before`: after samples, no sharded parameter is left gathered."""
    write = SampleCallback._write_samples

    def checked(self: SampleCallback, *args: Any) -> None:
        step = self._run.step
        names = [shard.record.name for shard in step.optimizer.shards if shard.is_fully_sharded]
        write(self, *args)
        assert all(isinstance(step.model.params[name].param, DTensor) for name in names)

    SampleCallback._write_samples = checked  # type: ignore[assignment, method-assign]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the folder of the run of a model on one rank."""
    folders: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in folders:
            folders[model] = tmp_path_factory.mktemp("reference") / "run"
            run(arguments(**sampled(folders[model], **MODELS[model])))
        return folders[model]

    return get


@pytest.mark.parametrize("layout", full_but(QUICK, LAYOUTS, "the other layouts combine the same parts"))
def test_texts_are_the_same_at_every_layout_and_change_nothing(
    tmp_path: Path, references: Callable[[str], Path], layout: str
) -> None:
    """Greedy in float64. Weights, moments and every logged number are those of the run without samples, bit for bit."""
    model, world_size, flags = LAYOUTS[layout]
    settings = {**MODELS[model], **flags}
    said = run(arguments(**sampled(tmp_path / "on", **settings)), world_size, before=checks_shards)
    run(arguments(**without_samples(tmp_path / "off", **settings)), world_size)
    expected = texts(references(model))
    assert [iteration for iteration, _ in expected] == [2, STEPS] and [prompt for prompt, _ in expected[0][1]] == PROMPTS
    assert texts(tmp_path / "on") == expected
    assert len({text for _, samples in expected for _, text in samples}) > 3, "the texts say something about the model"
    assert f"samples at iteration {STEPS}:" in said and f'    "7" -> "{expected[-1][1][1][1]}"' in said
    assert digest(tmp_path / "on", STEPS) == digest(tmp_path / "off", STEPS)
    assert timeless(tmp_path / "on" / "metrics") == timeless(tmp_path / "off" / "metrics")


def test_texts_are_those_of_the_checkpoint(references: Callable[[str], Path]) -> None:
    """The samples after the last step are what generation with cached keys gives for the checkpoint, without an expert capacity."""
    for model in ("plain", "experts"):
        folder = references(model)
        tokenizer = DataConfig(tokenizer_type="NullTokenizer", vocab_size=60)
        with LanguageModel.load(folder, tokenizer=tokenizer, dtype=torch.float64) as loaded:
            found = loaded.generate_batch(PROMPTS, 6, sampling=Sampling(temperature=0))
        assert [one.text for one in found] == [text for _, text in texts(folder)[-1][1]]


VARIANTS: dict[str, dict[str, Any]] = {
    "8 bits, a fraction of the loss at a time": {"bf16": True, "fp8_format": "hybrid", "loss_chunk_tokens": 8, "kv_channels": 16},
    "float16, all layers recomputed": {"fp16": True, "initial_loss_scale": 2.0**14, "recompute_granularity": "full"},
    "compiled, with dropout": {
        "compile": True,
        "compile_backend": "aot_eager",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "adapters": {"lora_rank": 2},
    "experts, jitter": {**EXPERTS, "moe_input_jitter_eps": 0.1},
    "average, gradient noise": {"ema_decay": 0.5, "log_gradient_noise": True, "log_max_attention_logit": True},
}


@pytest.mark.parametrize("variant", full_but([*VARIANTS][:3], VARIANTS, "what the others add, the forward does not see"))
def test_samples_change_nothing(tmp_path: Path, variant: str) -> None:
    """With random samples: the random states of the training are its own."""
    settings = {"fp64": None, **VARIANTS[variant]}
    changes = {"sample_temperature": 1.0, "sample_interval": 1}
    if "lora_rank" in settings:
        run(arguments(train_iters=1, save=tmp_path / "base"))
        settings |= {"pretrained_checkpoint": tmp_path / "base"}
    run(arguments(**sampled(tmp_path / "on", **settings, **changes)))
    run(arguments(**without_samples(tmp_path / "off", **settings)))
    assert [iteration for iteration, _ in texts(tmp_path / "on")] == [1, 2, STEPS]
    assert digest(tmp_path / "on", STEPS) == digest(tmp_path / "off", STEPS)
    metrics = [timeless(tmp_path / name / "metrics") for name in ("on", "off")]
    metrics = [[line for line in lines if "compile_seconds" not in line] for lines in metrics]
    assert metrics[0] == metrics[1] and len(metrics[0]) == STEPS


def test_random_samples_repeat_and_resume(tmp_path: Path, references: Callable[[str], Path]) -> None:
    """A run that resumes writes the texts of the run that never stopped. Texts differ from the greedy ones."""
    changes = {"sample_temperature": 2.0, "sample_interval": 1}
    run(arguments(**sampled(tmp_path / "one", **changes)))
    run(arguments(**sampled(tmp_path / "two", **changes, exit_interval=1)))
    run(arguments(**sampled(tmp_path / "two", **changes, load=tmp_path / "two")))
    assert texts(tmp_path / "two") == texts(tmp_path / "one")
    assert texts(tmp_path / "one")[-1] != texts(references("plain"))[-1]
    said = run(arguments(**sampled(tmp_path / "two", **changes, load=tmp_path / "two")))
    assert "samples at" not in said, "a finished run makes no further samples"


def test_a_rewind_discards_later_samples(tmp_path: Path) -> None:
    settings = {**REWINDS, "train_iters": REWIND_STEPS, "micro_batch_size": 4, "global_batch_size": 8}
    run(arguments(**sampled(tmp_path / "run", **settings, sample_interval=1)), before=bad_batches(BAD))
    assert [iteration for iteration, _ in texts(tmp_path / "run")] == [*range(1, REWIND_STEPS + 1)]
    lines = [json.loads(line) for line in (tmp_path / "run" / HISTORY_FILE).read_text().splitlines()]
    written = [line["iteration"] for line in lines if line["kind"] == "samples"]
    assert written == [1, 2, 3, 4, 5, 5, 6, 7], "iteration 5 is run again; the step with the spike has no samples"


def test_a_signal_ends_the_samples(tmp_path: Path) -> None:
    """To one rank only, while the first of thousands of tokens are generated."""

    def before(rank: int) -> None:
        original, calls = training_samples._BatchForward.compute_hidden_states, [0]

        def compute(self: Any, *args: Any) -> Any:
            calls[0] += 1
            if rank == 1 and calls[0] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            assert calls[0] < 10, "the signal is not honoured"
            return original(self, *args)

        training_samples._BatchForward.compute_hidden_states = compute  # type: ignore[assignment, method-assign]

    settings = {"exit_signal_code": 0, "train_iters": 9, "seq_length": 64, "sample_tokens": 50, "micro_batch_size": 1}
    said = run(arguments(**sampled(tmp_path / "run", **settings)), 2, before=before)
    assert "the samples at iteration 2 are given up on a signal" in said and "exiting on a signal to another rank" in said
    assert texts(tmp_path / "run") == [] and complete_checkpoints(tmp_path / "run") == ["iter_0000003"]


def test_an_end_before_the_last_step_has_no_further_samples(tmp_path: Path) -> None:
    run(arguments(**sampled(tmp_path / "run", exit_interval=1)))
    assert texts(tmp_path / "run") == []


def test_early_stopping_ends_with_samples(tmp_path: Path) -> None:
    stops = {"early_stopping_patience": 1, "early_stopping_min_delta": 100.0, "eval_interval": 1, "eval_iters": 1}
    said = run(arguments(**sampled(tmp_path / "run", **stops, train_iters=9, sample_interval=50)))
    assert "samples at iteration 2:" in said and [iteration for iteration, _ in texts(tmp_path / "run")] == [2]


FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("prompts.txt", None, "cannot be read: no such file or directory"),
    "empty": ("prompts.txt", b"\n \n", "has no prompts. Write one prompt per line"),
    "not UTF-8": ("prompts.txt", b"1 2\n\xff\xfe", "is not text in UTF-8 (byte 4)"),
    "no ids": ("prompts.txt", b"1 2\n3 x\n", "line 2: the tokenizer cannot encode this prompt: 'x' is not an id"),
    "long": ("prompts.txt", b"1 2\n" + b"1 " * 16, "line 2: the prompt has 16 tokens, but the model reads --seq-length 16"),
    "many": ("prompts.txt", b"1\n" * 101, "has 101 prompts, but at most 100 are allowed"),
    "not JSON": ("prompts.jsonl", b'{"prompt": "1"}\n{"prompt"\n', "line 2: not valid JSON"),
    "no text": ("prompts.jsonl", b'{"prompt": 7}\n', 'line 1: {"prompt": 7} has no text "prompt"'),
    "no object": ("prompts.jsonl", b"[1]\n", 'line 1: [1] has no text "prompt"'),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_before_training(tmp_path: Path, name: str) -> None:
    file_name, content, expected = FILES[name]
    path = tmp_path / file_name
    if content is not None:
        path.write_bytes(content)
    ended = launch(arguments(train_iters=1, sample_interval=1, sample_prompts=path), 2 if name == "long" else 1)
    assert {end.code for end in ended} <= {1, 2}, report(ended)
    assert f"--sample-prompts {path}" in ended[0].stderr and expected in ended[0].stderr, report(ended)
    assert "Traceback" not in ended[0].stderr and "iteration" not in ended[0].stdout


def test_a_file_that_one_rank_lacks_is_refused_on_all(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("1\n")

    def before(rank: int) -> None:
        if rank == 1:
            os.chdir("/")

    os.chdir(tmp_path)
    ended = launch(arguments(train_iters=1, sample_interval=1, sample_prompts="prompts.txt"), 2, before=before)
    assert all(end.code for end in ended) and "rank 1: --sample-prompts prompts.txt cannot be read" in ended[0].stderr


def test_default_prompts_and_every_output(tmp_path: Path) -> None:
    """With text: in the log, which no text breaks, in TensorBoard and in the report."""
    settings = {
        "train_iters": 2,
        "tokenizer_type": "ByteTokenizer",
        "vocab_size": None,
        "seq_length": 64,
        "sample_interval": 1,
        "sample_tokens": 5,
        "save": tmp_path,
        "tensorboard_dir": tmp_path / "board",
        "no_report": None,
    }
    said = run(arguments(**settings))
    assert f"samples every 1 steps and at the end: {len(DEFAULT_PROMPTS)} default prompts, up to 5 tokens each" in said
    assert [prompt for prompt, _ in texts(tmp_path)[0][1]] == [*DEFAULT_PROMPTS]
    assert all(line.isprintable() for line in said.splitlines())
    shown = [line for line in said.splitlines() if line.startswith('    "')]
    assert len(shown) == 2 * len(DEFAULT_PROMPTS)
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    assert len(tags) == len(DEFAULT_PROMPTS) and len(events.Tensors(tags[0])) == 2
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Samples</h2>" in page and page.index("(empty prompt)") < page.index("The capital of France is")


def test_the_file_has_escapes_and_objects(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "prompts.txt").write_text("one\\ntwo \\\\n\\x\r\n\nthree\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n{"prompt": "a\\nb", "more": 1}\n')
    found = {}
    for file in ("prompts.txt", "prompts.jsonl"):
        config = load(arguments(train_iters=1, seq_length=64, sample_interval=1, sample_prompts=tmp_path / file), 1).config
        found[file] = load_prompts(config, tokenizer)
    assert [prompt.text for prompt in found["prompts.txt"]] == ["one\ntwo \\n\\x", "three"]
    assert [prompt.text for prompt in found["prompts.jsonl"]] == ["", "a\nb"] and found["prompts.jsonl"][0].ids == [tokenizer.eod]


def test_the_flags_of_the_page(tmp_path: Path) -> None:
    """The flags of docs/watching.md exist, with the defaults that the page shows, and its log lines have the format of a run."""
    section = (ROOT / "docs/watching.md").read_text().partition("## Samples\n")[2].partition("\n## ")[0]
    words = [found for found in re.findall(r"`(--sample-[^`]+)`", section) if "prompts" not in found]
    (tmp_path / "prompts.txt").write_text("a\n")
    config = load(arguments(train_iters=1, sample_prompts=tmp_path / "prompts.txt") + " ".join(words).split(), 1).config
    assert config.logging.sample_interval == 200 and load(arguments(train_iters=1), 1).config.logging.sample_interval is None
    defaults = LoggingConfig()
    assert (config.logging.sample_tokens, config.logging.sample_temperature) == (
        defaults.sample_tokens,
        defaults.sample_temperature,
    )
    lines = re.findall(r"    (\".*)", section)
    for line in lines:
        prompt, text = (json.loads(part) for part in line.split(" -> "))
        assert Sample(prompt, text).format_log_line().strip() == line and prompt in DEFAULT_PROMPTS
    assert len(lines) == 2
