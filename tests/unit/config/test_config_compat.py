"""Launch scripts of Megatron-LM: each of its flags acts, is refused with a reason, or is named as having no effect."""

from __future__ import annotations

import shlex

import pytest

from megatron.config.cli import load, parse
from megatron.config.errors import ConfigError
from megatron.config.flags import find_flag, get_flags
from megatron.config.parsed_flags import TRANSLATED_SETTINGS
from megatron_lab.migration.compat import (
    _NO_EFFECT,
    _REFUSED,
    COMPAT_FLAGS,
    EQUIVALENT_CHOICES,
    EQUIVALENT_FLAGS,
    FLAG_PATTERNS,
    TRANSLATIONS,
    UNSUPPORTED_CHOICES,
    _parse_table,
    match_flag_pattern,
)

BASE = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 10 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)

SETTINGS = shlex.split("""
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention num-query-groups seq-length
max-position-embeddings position-embedding-type rotary-base rotary-percent use-rope-scaling rope-scaling-factor normalization
norm-epsilon swiglu squared-relu untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm
multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
attention-dropout hidden-dropout init-method-std make-vocab-size-divisible-by

micro-batch-size global-batch-size rampup-batch-size step-batch-size-schedule train-iters train-samples seed optimizer lr min-lr
lr-decay-style
lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples lr-warmup-fraction lr-warmup-init lr-wsd-decay-style
lr-wsd-decay-iters lr-wsd-decay-samples weight-decay start-weight-decay end-weight-decay weight-decay-incr-style clip-grad
adam-beta1 adam-beta2 adam-eps sgd-momentum override-opt-param-scheduler use-checkpoint-opt-param-scheduler iterations-to-skip

tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
account-for-loss-in-pipeline-split pipeline-model-parallel-layout no-overlap-p2p-communication context-parallel-size
expert-model-parallel-size sequence-parallel tp-comm-overlap data-parallel-sharding-strategy use-distributed-optimizer
overlap-grad-reduce grad-reduce-in-bf16
overlap-param-gather ddp-bucket-size optimizer-cpu-offload optimizer-offload-fraction
recompute-activations recompute-granularity recompute-method recompute-num-layers recompute-modules cpu-offloading-num-layers
distributed-backend distributed-timeout-minutes use-tp-pp-dp-mapping

fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis fp32-residual-connection
fp8-format fp8-recipe first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16

data-path train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path data-cache-path split mock-data
num-workers tokenizer-type tokenizer-model vocab-file merge-file vocab-size tiktoken-pattern tiktoken-num-special-tokens
tiktoken-special-tokens reset-position-ids reset-attention-mask eod-mask-loss

save load save-interval save-retain-interval async-save pretrained-checkpoint keep-last ckpt-step
no-save-optim no-load-optim finetune use-checkpoint-args exit-on-missing-checkpoint

log-interval eval-interval eval-iters full-validation multiple-validation-sets skip-train
log-throughput log-params-norm log-num-zeros-in-grad timing-log-level timing-log-option
tensorboard-dir tensorboard-log-interval log-timers-to-tensorboard log-memory-to-tensorboard wandb-project wandb-exp-name
exit-interval exit-duration-in-mins deterministic-mode manual-gc manual-gc-interval profile profile-step-start profile-step-end
profile-ranks
""")

REFUSED = shlex.split("""
num-distributed-optimizer-instances distribute-saved-activations offload-optimizer-states
no-fp8-wgrad fp4-format
moe-router-force-load-balancing moe-router-padding-for-fp8
batch-size use-legacy-models init-method-xavier-uniform deepspeed zero-stage cpu-optimizer
rl-prompts-per-eval retro-num-neighbors

""")

NO_EFFECT = shlex.split("""
use-mcore-models use-flash-attn attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 exit-signal-handler no-save-rng
no-load-rng no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
no-gradient-accumulation-fusion no-persist-layer-norm no-async-tensor-model-parallel-allreduce cross-entropy-loss-fusion
use-cpu-initialization calculate-per-token-loss overlap-p2p-communication-warmup-flush
use-megatron-fsdp init-model-with-meta-device no-align-param-gather no-align-grad-reduce use-precision-aware-optimizer
ckpt-assume-constant-structure use-persistent-ckpt-worker
overlap-param-gather-with-optimizer-step overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload
delay-wgrad-compute fsdp-double-buffer use-nccl-ub fp8-param-gather no-check-for-nan-in-loss-and-grad log-progress
disable-gloo-process-groups no-ckpt-fully-parallel-save test-mode verify-integrity
""")

NO_EFFECT_VALUES = {
    "transformer-impl": ("transformer_engine", "local"),
    "dataloader-type": ("single", "cyclic"),
    "ckpt-format": ("torch", "torch_dist", "fsdp_dtensor"),
    "dist-ckpt-strictness": ("log_all", "raise_all"),
    "empty-unused-memory-level": ("1", "2"),
    "microbatch-group-size-per-virtual-pipeline-stage": ("4",),
    "fp8-amax-history-len": ("1024",),
    "fp8-margin": ("0",),
    "data-impl": ("mmap",),
    "tp-comm-overlap-cfg": ("overlap.yaml",),
    "DDP-impl": ("local", "torch"),
    "local_rank": ("0",),
    "local-rank": ("3",),
    "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",),
}


_BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"


def test_a_setting_is_a_flag() -> None:
    for name in SETTINGS:
        assert find_flag(name) is not None, name
        assert name not in COMPAT_FLAGS


def test_a_flag_outside_what_is_built_is_refused_with_its_values() -> None:
    for name in REFUSED:
        with pytest.raises(ConfigError) as caught:
            load([*BASE, f"--{name}", "7", "8", "--bf16"], 1)
        (violation,) = caught.value.violations
        assert violation.flags == (f"--{name}",)
        assert violation.message == f"--{name} 7 8 is refused."
        assert violation.reason.endswith("."), name


def test_a_flag_that_is_always_on_is_named() -> None:
    plain = load(BASE, 1).config
    for name in NO_EFFECT:
        loaded = load([*BASE, f"--{name}"], 1)
        (note,) = loaded.notes
        assert note.startswith(f"--{name} has no effect: ")
        assert loaded.config == plain, name
        with pytest.raises(ConfigError, match="takes no value"):
            parse([f"--{name}", "7"])


def test_a_value_that_changes_nothing_is_named() -> None:
    for name, value in ((name, value) for name, values in NO_EFFECT_VALUES.items() for value in values):
        (note,) = load([*BASE, f"--{name}", value], 1).notes
        assert note.startswith(f"--{name} {value} has no effect: ")
        with pytest.raises(ConfigError, match="takes one value"):
            parse([f"--{name}"])


def test_families_that_change_nothing_are_named() -> None:
    given = "--cuda-graph-impl local --cuda-graph-scope attn moe --log-straggler --straggler-minmax-count 16 --no-pin-cpu-grads"
    loaded = load([*BASE, *given.split(), "--nccl-communicator-config-path", "nccl.yaml"], 1)
    assert loaded.config == load(BASE, 1).config
    assert [note.split(" no effect: ")[0].rpartition(" ")[0] for note in loaded.notes] == [
        "--cuda-graph-impl local, --cuda-graph-scope attn moe",
        "--log-straggler, --straggler-minmax-count 16",
        "--no-pin-cpu-grads",
        "--nccl-communicator-config-path nccl.yaml",
    ]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--tokenizer-type", "MultimodalTokenizer"], ["MultimodalTokenizer is not supported yet", "sentencepiece"]),
        (["--position-embedding-type", "mrope"], ["mrope is not supported yet", "rope"]),
        (["--dataloader-type", "external"], ["external is refused", "indexed files"]),
        (["--ckpt-format", "orbax"], ["--ckpt-format orbax", "torch or torch_dist or"]),
        (["--no-position-embedding"], ["--no-position-embedding is refused", "--position-embedding-type none"]),
        (["--attention-backend", "local"], ["local is not supported", "--attention-backend unfused computes the same"]),
        (["--recompute-modules", "core_attn", "moe_act"], ["moe_act is not supported;", "--recompute-modules mlp_act computes"]),
        (["--rerun-mode", "validate_results"], ["disabled only"]),
        (["--recompute-modules", "shared_experts"], ["shared_experts is not supported;", "mlp includes experts"]),
        (
            ["--moe-token-dispatcher-type", "flex"],
            ["flex is not supported", "--moe-token-dispatcher-type alltoall computes the same"],
        ),
        (["--position-embedding-type", "yarn"], ["yarn is not", "--position-embedding-type rope --rope-type yarn computes"]),
        (["--moe-enable-deepep"], ["--moe-enable-deepep is refused", "Use --moe-token-dispatcher-type alltoall, which computes"]),
        (["--moe-deepep-num-sms", "20"], ["Use --moe-token-dispatcher-type alltoall, which computes the same"]),
        (["--moe-layer-recompute"], ["Use --recompute-granularity selective --recompute-modules mlp, which"]),
        (["--exp-avg-sq-dtype", "fp16"], ["--exp-avg-sq-dtype fp16", "--optimizer adam8bit"]),
        (["--no-mock-data", "--data-path", "0.3", "a", "b", "0.7"], ["value 3, 'b'", "should be a weight"]),
        (["--no-mock-data", "--data-path", "1.0", "b", "2"], ["the last weight, 2, has no prefix", "./2"]),
    ],
)
def test_a_value_outside_what_is_built_is_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *words], 2)
    for part in parts:
        assert part in str(caught.value)


def test_every_name_has_one_fate() -> None:
    names = [name for table in (_NO_EFFECT, _REFUSED) for name, _, _ in _parse_table(table)]
    names += EQUIVALENT_FLAGS
    assert len(names) == len(set(names)) and set(names) == {*COMPAT_FLAGS, *FLAG_PATTERNS} and not {*COMPAT_FLAGS} & {*TRANSLATIONS}
    for name, known in COMPAT_FLAGS.items():
        assert find_flag(name) is None, name
        assert known.reason
    for (name, value), reason in UNSUPPORTED_CHOICES.items():
        assert reason
        assert name not in get_flags() or value not in get_flags()[name].choices, (name, value)


def test_what_computes_the_same_is_accepted_here() -> None:
    """Each replacement has settings and values of this project, and its remark is part of a sentence."""
    words = "--num-experts 4 --disable-bias-linear --recompute-granularity selective"
    for equivalent in (*EQUIVALENT_FLAGS.values(), *EQUIVALENT_CHOICES.values()):
        assert load([*BASE, *words.split(), *equivalent.flags.split()], 1).config
        assert equivalent.remark and not equivalent.remark.endswith("."), equivalent


def test_no_setting_belongs_to_a_family() -> None:
    """A pattern that also fits a setting would make a typo of it a refusal; those are told apart by how near they are spelled."""
    both = [
        "fsdp-shard-size",
        "fsdp-reshard-after-forward",
        "fsdp-reduce-once",
        "fsdp-params-cpu",
        "straggler-interval",
        "ckpt-step",
    ]
    assert [name for name in get_flags() if match_flag_pattern(name) is not None] == both
    for name in both:
        with pytest.raises(ConfigError, match=f"Perhaps you meant --{name}"):
            parse([f"--{name}s", "3"])


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--checkpoint-activations", "--recompute-granularity full"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", _BLOCK),
        ("--use-rotary-position-embeddings --no-position-embedding", "--position-embedding-type rope"),
        ("--use-torch-fsdp2", "--data-parallel-sharding-strategy optim_grads_params"),
        ("--eval-iters -1", "--eval-iters 0"),
        ("--optimizer dist_muon", "--optimizer muon"),
    ],
)
def test_an_old_name_is_taken_as_a_new_one(words: str, same: str) -> None:
    old, new = load([*BASE, *words.split()], 2), load([*BASE, *same.split()], 2)
    assert old.config == new.config
    assert sum(" is taken as " in note for note in old.notes) == words.count("--") - words.count("--no-position")


def test_a_reason_is_told_once_for_all_its_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            [*BASE, *"--moe-latent-size 64 --log-energy --moe-router-padding-for-fp8 --moe-use-upcycling --log-progress".split()], 1
        )
    (violation,) = caught.value.violations
    assert violation.message == "--moe-latent-size 64, --moe-router-padding-for-fp8, --moe-use-upcycling are refused."
    loaded = load([*BASE, *"--no-rope-fusion --fp8-margin 0 --no-bias-swiglu-fusion --fp8-interval 1".split()], 1)
    assert [note.split(" have no effect: ")[0] for note in loaded.notes] == [
        "--no-rope-fusion, --no-bias-swiglu-fusion",
        "--fp8-margin 0, --fp8-interval 1",
    ]


_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(
    ("flags_", "strategy", "notes"),
    [
        (_OVERLAPS, "optim", []),
        (f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads {_OVERLAPS}", "optim_grads", ["use-distributed"]),
        (
            f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params {_OVERLAPS} --init-model-with-meta-device "
            "--ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion",
            "optim_grads_params",
            ["init-model", "ckpt-format", "no-gradient", "use-distributed", "overlap-grad-reduce", "overlap-param-gather"],
        ),
        ("--use-megatron-fsdp", "no_shard", []),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer "
            f"--overlap-cpu-optimizer-d2h-h2d {_OVERLAPS} --main-grads-dtype fp32",
            "optim",
            ["use-precision", "overlap-cpu", "main-grads"],
        ),
    ],
)
def test_sharding_of_megatron_is_understood(flags_: str, strategy: str, notes: list[str]) -> None:
    """Each setting acts as there, and what does nothing beside the others is named."""
    loaded = load([*BASE, *flags_.split()], 8)
    expected = [*(["use-megatron-fsdp"] if "--use-megatron-fsdp" in flags_ else []), *notes]
    assert loaded.config.parallel.sharding == strategy
    assert len(loaded.notes) == len(expected)
    for note, name in zip(loaded.notes, expected, strict=True):
        assert note.startswith(f"--{name}") and " has no effect: " in note


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--zero-stage 3", "optim_grads_params"),
        ("--cpu-optimizer", "--optimizer-cpu-offload"),
        ("--num-distributed-optimizer-instances 2", "--fsdp-shard-size N"),
        ("--no-strict-fsdp-dtensor-load", "--fsdp-shard-size"),
        ("--offload-optimizer-states", "--optimizer-cpu-offload"),
    ],
)
def test_other_ways_of_sharding_are_refused_with_what_to_write(words: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*BASE, *words.split()], 2)
    (violation,) = caught.value.violations
    assert advice in violation.reason


@pytest.mark.parametrize(
    ("split", "schedule", "chunks"),
    [
        ("--num-layers-per-virtual-pipeline-stage 5", "interleaved", 2),
        ("--num-virtual-stages-per-pipeline-rank 5 --overlap-p2p-communication-warmup-flush", "interleaved", 5),
        ("--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 12 --no-overlap-p2p-communication", "1f1b", 1),
        ("--pipeline-model-parallel-layout Et*9|(t*10|)*6,t*11L", "1f1b", 1),
        ("--pipeline-model-parallel-layout Et*4|(t*5|)*14,t*6,L", "interleaved", 2),
    ],
)
def test_a_pipeline_of_megatron_is_understood(split: str, schedule: str, chunks: int) -> None:
    """Eighty layers on eight stages, split in the ways of Megatron-LM."""
    parallel = load([*BASE, "--num-layers", "80", "--pipeline-model-parallel-size", "8", *split.split()], 8).config.parallel
    assert (parallel.schedule, parallel.get_chunks_per_stage(80)) == (schedule, chunks)


def test_settings_that_are_taken_as_others_are_listed() -> None:
    """A command line with settings alone does not import the table."""
    assert [name for name in TRANSLATIONS if find_flag(name) is not None] == [*TRANSLATED_SETTINGS]
    assert not [name for name in COMPAT_FLAGS if find_flag(name) is not None]
