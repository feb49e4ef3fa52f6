"""Random command lines, each refused in words or trained as one plain process does; a few of those that `run.sh --fuzz` draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from megatron.config.cli import load
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from tests.support.random_configs import CommandLine, line_of, simpler
from tests.support.random_runs import Outcome, WrongError, judge
from tests.trials import fuzz

QUICK, FULL = (1, 4, 8, 10, 22, 42, 47), range(1, 101)
"""In the quick run none of many tensor ranks or of many chunks of a loss, which are the dear ones."""
STARTED = 4
"""One line in so many is also run as a user runs it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", FULL if metafunc.config.getoption("--full") else QUICK)


def test_a_line_is_refused_or_trains_as_one_process_does(number: int) -> None:
    """A crash, a hang or another result fails, with the line to repeat it."""
    judge(line_of(number), started=number % STARTED == 0)


@pytest.mark.full("the lines above: some are run, some refused")
def test_most_lines_can_be_run_and_everything_is_drawn() -> None:
    """Or the proof above would be of little."""
    drawn: list[Config] = []
    lines = [line_of(number) for number in range(9, 80)]
    for line in lines:
        with contextlib.suppress(ConfigError):
            drawn.append(load(line.argv, line.world_size).config)
    assert 0.5 < len(drawn) / len(lines) < 0.9
    found = {setting for config in drawn for setting in _looked_for(config)}
    assert {*_WANTED} <= found, {*_WANTED} - found
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= {line.world_size for line in lines}


_WANTED = [
    *("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "balanced"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *(
        "use_tp_pp_dp_mapping",
        "sequence_parallel",
        "tp_comm_overlap",
        "fsdp_shard_size",
        "never",
        "fsdp_reduce_once",
        "fsdp_params_cpu",
        "overlap_grad_reduce",
        "overlap_param_gather",
    ),
    *("optimizer_cpu_offload", "fp16", "bf16", "fp64", "swiglu", "squared_relu", "qk_layernorm", "RMSNorm", "rope", "none"),
    *("compile", "fp8_format", "first_last_layers_bf16", "hybrid", "tensorwise", "rowwise"),
    *("learned_absolute", "group_query_attention", "kv_channels", "use_rope_scaling", "disable_bias_linear", "add_qkv_bias"),
    *("window_size", "window_attn_skip_freq", "no_rope_freq", "rotary_base_local", "softmax_scale", "attn_logit_softcapping"),
    *("learnable", "off-by-one", "qk_layernorm_all_heads", "add_attn_output_bias", "add_mlp_bias"),
    *("multi_latent_attention", "q_lora_rank", "lora_rank", "lora_alpha", "lora_targets"),
    *(
        "untie_embeddings_and_output_weights",
        "rampup_batch_size",
        "step_batch_size_schedule",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
    ),
    *(
        "sgd",
        "adam",
        "lion",
        "ademamix",
        "adafactor",
        "lamb",
        "adam8bit",
        "muon",
        "muon_split_heads",
        "muon_no_split_qkv",
        "WSD",
        "cosine",
        "inverse-square-root",
        "constant",
        "train_samples",
        "iterations_to_skip",
        "skip",
    ),
    *(
        "loss_chunk_tokens",
        "z_loss_coeff",
        "label_smoothing",
        "mtp_num_layers",
        "cpu_offload_activations",
        "cpu_offloading",
        "cpu_offloading_num_layers",
    ),
]
"""Settings that are on, and choices, that must occur among the lines that can be run."""


def _looked_for(config: Config) -> Iterator[str]:
    parallel, optimizer = config.parallel, config.optimizer
    yield from (parallel.schedule, parallel.sharding, parallel.pipeline_split, parallel.fsdp_reshard_after_forward)
    yield from (config.precision.fp8_recipe, config.precision.fp8_format or "")
    yield from (optimizer.optimizer, optimizer.lr_decay_style, config.model.normalization, config.model.position_embedding_type)
    yield config.model.softmax_type
    yield config.spikes.spike_policy
    for topic in (parallel, optimizer, config.model, config.training, config.precision, config.memory, config.speed, config.data):
        yield from (field for field, value in vars(topic).items() if value)


def test_a_number_always_gives_the_same_line() -> None:
    """So that it repeats a failure; others give other lines."""
    assert line_of(3) == line_of(3)
    assert len({line_of(number) for number in range(5)}) == 5


# ---- the long run


@pytest.fixture
def swiglu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every line with two flags together came to something wrong."""

    def judged(line: CommandLine, timeout: float, *, started: bool) -> Outcome:
        if "--swiglu" in line.argv and "--hidden-size" in line.argv:
            raise WrongError(line, AssertionError("loss of step 1: too high"))
        return Outcome.EQUAL

    monkeypatch.setattr(fuzz, "judge", judged)


def test_a_long_run_tells_what_failed(swiglu_fails: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The seed, the counts, the line in full and made simple; and the exit status."""
    number = next(number for number in range(1, 100) if "--swiglu" in line_of(number).argv)
    assert fuzz.main(["--fuzz", "0.003", "--fuzz-seed", str(number)]) == 1
    said = capsys.readouterr().out
    assert f"--fuzz-seed {number}" in said and f"number {number}: {line_of(number)}" in said
    assert "1 failed" in said or "failed\nnumber" in said
    lines = [line for line in said.splitlines() if line.startswith("Repeat it by: bash tests/run.sh --fuzz-repeat ")]
    assert lines[0].endswith(str(line_of(number)))
    assert lines[1].split("--fuzz-repeat ")[1].split()[1::2] == ["--hidden-size", "--swiglu"]


def test_a_long_run_without_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A seed of its own, and the status 0."""
    monkeypatch.setattr(fuzz, "judge", lambda *_, **__: Outcome.REFUSED)
    assert fuzz.main(["--fuzz", "0.002"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--fuzz-seed ") and " 0 failed" in said and " refused" in said


def test_a_line_is_repeated(swiglu_fails: None, capsys: pytest.CaptureFixture[str]) -> None:
    """With words that look like flags of the script."""
    assert fuzz.main(["--fuzz-repeat", "2", "--hidden-size", "4", "--swiglu"]) == 1
    assert "loss of step 1: too high" in capsys.readouterr().out
    assert fuzz.main(["--fuzz-repeat", "2", "--fuzz", "4"]) == 0


def test_a_failing_line_is_made_simpler() -> None:
    """Fewer flags, smaller numbers and fewer ranks, but no other failure."""
    line = CommandLine(("--tensor-model-parallel-size", "2", "--num-layers", "8", "--bf16", "--lr", "0.1"), 8)

    def fails(other: CommandLine) -> bool:
        layers = other.argv[other.argv.index("--num-layers") + 1] if "--num-layers" in other.argv else "0"
        return int(layers) >= 3 and other.world_size >= 3

    assert simpler(line, fails, 100) == CommandLine(("--tensor-model-parallel-size", "2", "--num-layers", "3"), 4)
    assert simpler(line, fails, 0) == line
