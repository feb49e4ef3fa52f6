"""The rules between settings: each reports what it is for, and what it suggests is valid."""

from __future__ import annotations

import dataclasses
import typing
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.checks.finding import find_divisors, find_multiples_near, get_value, is_set
from megatron.config.checks.single_settings import check_strict_conditions, list_idle_settings
from megatron.config.cli import load, parse
from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.flags import Flag, find_flag, get_flags, get_topics
from megatron.config.parallel import ShardingStrategy
from megatron.config.rules import RULES, find_violations
from tests.support.rule_cases import (
    BASE,
    LORA_RULES,
    PIPELINE_RULES,
    SHARDING_RULES,
    Case,
    argv,
    check_case,
    check_rules_have_cases,
    config_of,
    every,
    reported,
)

DATA = "--no-mock-data --data-path corpus"


LATENT = "--multi-latent-attention --position-embedding-type rope"
EXPERTS = "--num-experts 8 --disable-bias-linear"

CASES: list[Case] = [
    ("--num-layers 0", 1, {"--num-layers"}, ["--num-layers is missing"], []),
    (
        "--mtp-num-layers 4 --seq-length 4",
        1,
        {"--mtp-num-layers", "--seq-length"},
        ["leaves the last depth without a label"],
        ["--mtp-num-layers 3", "--seq-length 5"],
    ),
    ("--attention-dropout 1", 1, {"--attention-dropout"}, ["1.0 is out of range", "at least 0 and below 1"], []),
    ("--hidden-dropout -0.5", 1, {"--hidden-dropout"}, ["out of range"], ["--hidden-dropout 0.0"]),
    ("--lr nan", 1, {"--lr"}, ["out of range", "above 0"], []),
    (f"--tensorboard-dir {'x' * 6000}", 1, {"--tensorboard-dir"}, ["not a valid path", "longer than 255 bytes"], []),
    (f"--save {'x/' * 3000}", 1, {"--save"}, ["not a valid path", "longer than 3,841 bytes"], []),
    (f"--save {'x/' * 1000}", 1, {"--save"}, ["not a valid path", "more than 256 levels"], []),
    ("--data-path 0.5 a 0.5 'b\0'", 1, {"--data-path"}, [r"b\0 is not a valid path", "NUL"], []),
    ("--load '\udce9'", 1, {"--load"}, [r"\udce9 is not a valid path", "not text in UTF-8"], []),
    ("--clip-grad inf", 1, {"--clip-grad"}, ["out of range"], []),
    ("--timing-log-level 3", 1, {"--timing-log-level"}, ["at least 0 and at most 2"], ["--timing-log-level 2"]),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0", 1, {"--lr-warmup-iters", "--lr-warmup-fraction"}, ["exclude each other"], []),
    ("--seed -1", 1, {"--seed"}, ["at most 4294967295"], ["--seed 0"]),
    ("--iterations-to-skip 0 3", 1, {"--iterations-to-skip"}, ["Each number must be at least 1"], []),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
        1,
        {"--optimizer-offload-fraction"},
        ["at least 0 and at most 1"],
        ["--optimizer-offload-fraction 1.0"],
    ),
    ("--num-layers -3", 1, {"--num-layers"}, ["--num-layers -3 is out of range"], ["--num-layers 1"]),
    ("", 0, set(), ["The world size 0 is out of range"], ["world size 1"]),
    ("", -8, set(), ["The world size -8 is out of range"], ["world size 1"]),
    ("", 10_000_000, set(), ["The world size 10,000,000 is out of range", "at most 1,048,576"], []),
    ("--num-layers 1000000000", 1, {"--num-layers"}, ["at most 100000."], ["--num-layers 100000"]),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 1e400",
        1,
        {"--optimizer-offload-fraction"},
        ["inf is out of range"],
        [],
    ),
    # model
    (
        "--hidden-size 100",
        1,
        {"--hidden-size", "--num-attention-heads"},
        ["--hidden-size 100 is not divisible by --num-attention-heads 12"],
        ["--num-attention-heads 10", "--hidden-size 96", "--hidden-size 108"],
    ),
    ("--hidden-size 12 --swiglu", 1, {"--ffn-hidden-size"}, ["8 x 12 / 3", "which is 0"], ["--ffn-hidden-size 8"]),
    (
        "--group-query-attention --num-query-groups 5",
        1,
        {"--num-query-groups"},
        ["12 is not divisible by --num-query-groups 5"],
        ["--num-query-groups 4", "--num-query-groups 6"],
    ),
    ("--swiglu --squared-relu --hidden-size 192", 1, {"--swiglu", "--squared-relu"}, ["exclude each other"], ["--no-swiglu"]),
    (
        "--position-embedding-type rope --kv-channels 7",
        1,
        {"--kv-channels", "--rotary-percent"},
        ["head of 7 channels rotates 7"],
        ["--kv-channels 6", "--kv-channels 8"],
    ),
    (
        "--position-embedding-type rope --rotary-percent 0.2",
        1,
        {"--rotary-percent"},
        ["--rotary-percent 0.2 of a head of 8 channels rotates 1"],
        ["--rotary-percent 0.25", "--rotary-percent 0.5"],
    ),
    (
        "--multi-latent-attention",
        1,
        {"--multi-latent-attention", "--position-embedding-type"},
        ["--multi-latent-attention cannot be used with --position-embedding-type learned_absolute"],
        ["--position-embedding-type rope"],
    ),
    (
        f"{LATENT} --group-query-attention",
        1,
        {"--multi-latent-attention", "--group-query-attention"},
        ["exclude each other"],
        ["--no-group-query-attention"],
    ),
    (
        f"{LATENT} --qk-layernorm --qk-layernorm-all-heads --normalization RMSNorm",
        1,
        {"--multi-latent-attention", "--qk-layernorm-all-heads"},
        ["exclude each other"],
        ["--no-qk-layernorm-all-heads"],
    ),
    (
        f"{LATENT} --mup-base-width 24",
        1,
        {"--multi-latent-attention", "--mup-base-width"},
        ["exclude each other"],
        ["--mup-base-width None"],
    ),
    (
        f"{LATENT} --qk-pos-emb-head-dim 7",
        1,
        {"--qk-pos-emb-head-dim"},
        ["--qk-pos-emb-head-dim 7 is odd"],
        ["--qk-pos-emb-head-dim 6", "--qk-pos-emb-head-dim 8"],
    ),
    ("--window-size 7", 1, {"--window-size"}, ["--window-size 7 cannot be read", "N-1,0"], ["--window-size 7,0"]),
    ("--window-size 7,1", 1, {"--window-size"}, ["attention is causal"], ["--window-size 7,0"]),
    (
        "--window-size 7,0 --window-attn-skip-freq [1,0]*3",
        1,
        {"--window-attn-skip-freq", "--num-layers"},
        ["The list in the layer pattern has 6 entries, but the model has 4 layers"],
        ["--num-layers 6"],
    ),
    (
        "--window-size 7,0 --window-attn-skip-freq ([1]*3+[0]",
        1,
        {"--window-attn-skip-freq"},
        ["A parenthesis ( of the layer pattern is not closed"],
        [],
    ),
    (
        "--position-embedding-type rope --no-rope-freq [0,0,2,1]",
        1,
        {"--no-rope-freq"},
        ["has '2' at an invalid position. Write only 0 and 1, separated by commas"],
        [],
    ),
    (
        "--qk-layernorm --qk-layernorm-all-heads",
        1,
        {"--qk-layernorm-all-heads", "--normalization"},
        ["cannot be used with --normalization LayerNorm"],
        ["--normalization RMSNorm"],
    ),
    (
        "--max-position-embeddings 16",
        1,
        {"--seq-length", "--max-position-embeddings"},
        ["--seq-length 32 is above --max-position-embeddings 16"],
        ["--max-position-embeddings 32", "--seq-length 16"],
    ),
    # layout
    (
        "--tensor-model-parallel-size 8",
        8,
        {"--num-attention-heads", "--tensor-model-parallel-size"},
        ["--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8", "whole heads"],
        ["--tensor-model-parallel-size 4", "--num-attention-heads 8", "--num-attention-heads 16"],
    ),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"},
        ["The world size 6 is not divisible by TP x CP x PP = 2 x 1 x 2 = 4"],
        ["world size 4", "world size 8", "--tensor-model-parallel-size 1", "--pipeline-model-parallel-size 3"],
    ),
    (
        "--tensor-model-parallel-size 4",
        2,
        {"--tensor-model-parallel-size"},
        ["The world size 2"],
        ["world size 4", "--tensor-model-parallel-size 2"],
    ),
    (
        "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 4 --kv-channels 1",
        4,
        {"--num-query-groups", "--tensor-model-parallel-size"},
        ["does not fit --tensor-model-parallel-size 4: 4 ranks cannot divide the rows"],
        ["--num-query-groups 4"],
    ),
    (
        "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4 --normalization RMSNorm --qk-layernorm "
        "--qk-layernorm-all-heads",
        4,
        {"--qk-layernorm-all-heads", "--tensor-model-parallel-size"},
        ["ranks share the 2 key-value heads"],
        ["--tensor-model-parallel-size 2", "--no-qk-layernorm-all-heads"],
    ),
    (
        "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4 --compile",
        4,
        {"--compile", "--tensor-model-parallel-size"},
        ["ranks share the 2 key-value heads"],
        ["--tensor-model-parallel-size 2", "--no-compile"],
    ),
    (
        "--group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4",
        4,
        {"--num-query-groups", "--tensor-model-parallel-size"},
        ["--num-query-groups 6 does not fit --tensor-model-parallel-size 4"],
        ["--tensor-model-parallel-size 2", "--num-query-groups 4", "--num-query-groups 12"],
    ),
    (
        "--ffn-hidden-size 130 --tensor-model-parallel-size 4",
        4,
        {"--ffn-hidden-size", "--tensor-model-parallel-size"},
        ["The width of the MLP 130"],
        ["--ffn-hidden-size 128", "--ffn-hidden-size 132", "--tensor-model-parallel-size 2"],
    ),
    (
        "--seq-length 30 --tensor-model-parallel-size 4 --sequence-parallel",
        4,
        {"--seq-length", "--sequence-parallel"},
        ["--seq-length 30 is not divisible by --tensor-model-parallel-size 4"],
        ["--seq-length 28", "--seq-length 32", "--tensor-model-parallel-size 2", "--no-sequence-parallel"],
    ),
    (
        "--context-parallel-size 3",
        6,
        {"--seq-length", "--context-parallel-size"},
        ["is not divisible by 2 x --context-parallel-size 3", "two segments of equal length"],
        ["--context-parallel-size 2", "--seq-length 30"],
    ),
    (
        "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 12",
        8,
        {"--seq-length", "--context-parallel-size"},
        ["by --context-parallel-size 2 x --tensor-model-parallel-size 4"],
        ["--context-parallel-size 1", "--seq-length 16"],
    ),
    (
        "--context-parallel-size 2 --cp-comm-type p2p a2a all_gather",
        2,
        {"--cp-comm-type", "--num-layers"},
        ["3 values, but there are 4 layers"],
        ["--cp-comm-type p2p"],
    ),
    (
        "--context-parallel-size 2 --cp-comm-type a2a --group-query-attention --num-query-groups 1",
        2,
        {"--cp-comm-type", "--context-parallel-size", "--tensor-model-parallel-size"},
        ["1 key-value heads are not divisible"],
        ["--cp-comm-type all_gather", "--context-parallel-size 1"],
    ),
    (
        "--context-parallel-size 2 --bf16 --fp8-format e4m3 --fp8-recipe blockwise --hidden-size 384 --seq-length 256",
        2,
        {"--fp8-recipe", "--context-parallel-size"},
        ["is not supported", "blocks of 128 consecutive tokens"],
        ["--fp8-recipe rowwise", "--context-parallel-size 1"],
    ),
    (
        "--context-parallel-size 2 --attention-backend flash --device cpu --attention-dropout 0",
        2,
        {"--attention-backend"},
        ["takes no part of a sequence on a CPU"],
        ["--attention-backend auto"],
    ),
    ("--expert-model-parallel-size 2", 2, {"--expert-model-parallel-size"}, ["only with --num-experts"], []),
    ("--expert-tensor-parallel-size 2", 2, {"--expert-tensor-parallel-size"}, ["only with --num-experts"], []),
    ("--moe-layer-freq 2", 1, {"--moe-layer-freq"}, ["only with --num-experts"], []),
    ("--moe-ffn-hidden-size 8", 1, {"--moe-ffn-hidden-size"}, ["only with --num-experts"], []),
    ("--moe-router-topk 1", 1, {"--moe-router-topk"}, ["only with --num-experts"], []),
    ("--moe-shared-expert-intermediate-size 8", 1, {"--moe-shared-expert-intermediate-size"}, ["only with --num-experts"], []),
    (f"{EXPERTS} --moe-shared-expert-gate", 1, {"--moe-shared-expert-gate"}, ["--moe-shared-expert-intermediate-size"], []),
    ("--moe-router-score-function sigmoid", 1, {"--moe-router-score-function"}, ["only with --num-experts"], []),
    ("--moe-router-pre-softmax", 1, {"--moe-router-pre-softmax"}, ["only with --num-experts"], []),
    ("--moe-router-topk-scaling-factor 2", 1, {"--moe-router-topk-scaling-factor"}, ["only with --num-experts"], []),
    ("--moe-router-num-groups 2", 1, {"--moe-router-num-groups"}, ["only with --num-experts"], []),
    (f"{EXPERTS} --moe-router-group-topk 2", 1, {"--moe-router-group-topk"}, ["only with --moe-router-num-groups"], []),
    ("--moe-router-dtype fp64", 1, {"--moe-router-dtype"}, ["only with --num-experts"], []),
    ("--moe-router-load-balancing-type none", 1, {"--moe-router-load-balancing-type"}, ["only with --num-experts"], []),
    ("--moe-aux-loss-coeff 0.1", 1, {"--moe-aux-loss-coeff"}, ["only with --num-experts"], []),
    ("--moe-z-loss-coeff 0.1", 1, {"--moe-z-loss-coeff"}, ["only with --num-experts"], []),
    (f"{EXPERTS} --moe-router-enable-expert-bias", 1, {"--moe-router-enable-expert-bias"}, ["--moe-router-score-function"], []),
    ("--moe-expert-capacity-factor 1", 1, {"--moe-expert-capacity-factor"}, ["only with --num-experts"], []),
    (f"{EXPERTS} --moe-expert-capacity-factor 0.5", 1, {"--moe-expert-capacity-factor"}, ["at least 1"], []),
    (f"{EXPERTS} --moe-token-drop-policy position", 1, {"--moe-token-drop-policy"}, ["--moe-expert-capacity-factor"], []),
    (f"{EXPERTS} --moe-pad-expert-input-to-capacity", 1, {"--moe-pad-expert-input-to-capacity"}, ["capacity-factor"], []),
    ("--moe-input-jitter-eps 0.1", 1, {"--moe-input-jitter-eps"}, ["only with --num-experts"], []),
    (
        f"{EXPERTS} --moe-router-topk 9",
        1,
        {"--moe-router-topk", "--num-experts"},
        ["selects each expert at most once"],
        ["--moe-router-topk 8"],
    ),
    (
        f"{EXPERTS} --moe-router-topk 1",
        1,
        {"--moe-router-topk", "--moe-router-score-function", "--moe-router-pre-softmax"},
        ["the router no gradient"],
        ["--moe-router-pre-softmax", "--moe-router-topk 2"],
    ),
    (f"{EXPERTS} --moe-router-num-groups 3", 1, {"--num-experts", "--moe-router-num-groups"}, ["8 is not divisible"], []),
    (
        f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 4 --moe-router-topk 4",
        1,
        {"--moe-router-group-topk", "--moe-router-num-groups"},
        ["4 is above"],
        [],
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
        1,
        {"--moe-router-topk", "--moe-router-group-topk"},
        ["is not divisible"],
        ["--moe-router-topk 2", "--moe-router-topk 4"],
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 6",
        1,
        {"--moe-router-topk", "--moe-router-group-topk"},
        ["more than the 4 experts in 2 groups"],
        ["--moe-router-topk 4"],
    ),
    (f"{EXPERTS} --expert-model-parallel-size 3", 6, {"--num-experts"}, ["8 is not divisible"], ["--expert-model-parallel-size 2"]),
    (f"{EXPERTS} --expert-model-parallel-size 4", 2, {"--expert-model-parallel-size"}, ["The 2 ranks of a pipeline stage"], []),
    (
        f"{EXPERTS} --moe-layer-freq [1,0]",
        1,
        {"--moe-layer-freq", "--num-layers"},
        ["2 entries, but the model has 4 layers"],
        ["--num-layers 2"],
    ),
    (
        f"{EXPERTS} --moe-ffn-hidden-size 9 --expert-tensor-parallel-size 2",
        2,
        {"--moe-ffn-hidden-size", "--expert-tensor-parallel-size"},
        ["9 is not divisible by the 2 ranks"],
        ["--moe-ffn-hidden-size 10"],
    ),
    (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 9 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        {"--moe-shared-expert-intermediate-size", "--tensor-model-parallel-size"},
        ["is not divisible by"],
        ["--moe-shared-expert-intermediate-size 10"],
    ),
    (f"{EXPERTS} --tensor-model-parallel-size 2", 2, {"--sequence-parallel"}, ["same tokens"], ["--sequence-parallel"]),
    ("--num-experts 8", 1, {"--num-experts", "--disable-bias-linear"}, ["biases are not supported"], []),
    (f"{EXPERTS} --moe-layer-freq [0,0,0,0]", 1, {"--moe-layer-freq"}, ["leaves no layer with experts"], []),
    (f"{EXPERTS} --param-groups '* optimizer=muon'", 1, {"--param-groups"}, ["muon for some parameters"], []),
    (f"{EXPERTS} --optimizer muon", 1, {"--num-experts", "--optimizer"}, ["not supported yet"], ["--optimizer adam"]),
    (f"{EXPERTS} --bf16 --fp8-format hybrid", 1, {"--num-experts", "--fp8-format"}, ["not supported yet"], []),
    (f"{EXPERTS} --mup-base-width 48", 1, {"--num-experts", "--mup-base-width"}, ["muP does not support experts"], []),
    (f"{EXPERTS} --log-gradient-noise", 2, {"--num-experts", "--log-gradient-noise"}, ["samples of other data ranks"], []),
    (
        "--device cpu --distributed-backend nccl",
        1,
        {"--device", "--distributed-backend"},
        ["nccl cannot be used with --device cpu"],
        ["--distributed-backend gloo", "--device cuda"],
    ),
    (
        "--profile --profile-ranks 0 4 9",
        4,
        {"--profile-ranks"},
        ["names 4, 9, but the world size is 4"],
        ["--profile-ranks 0 3", "world size 10"],
    ),
    # training
    ("--train-iters None", 1, {"--train-iters", "--train-samples", "--train-epochs"}, ["are all missing"], []),
    (f"{DATA} --train-epochs 2", 1, {"--train-iters", "--train-epochs"}, ["exclude each other"], ["--train-epochs None"]),
    ("--train-iters None --train-epochs 2", 1, {"--train-epochs", "--mock-data"}, ["cannot be used with --mock-data"], []),
    (
        f"{DATA} --train-iters None --train-epochs 2 --lr-warmup-iters 3 --lr-decay-samples 64",
        1,
        {"--lr-warmup-iters", "--lr-decay-samples"},
        ["cannot be used together"],
        ["--lr-decay-samples None", "--lr-warmup-iters 0"],
    ),
    ("--keep-best --save s", 1, {"--keep-best", "--eval-interval"}, ["--eval-interval is not set"], ["--eval-interval 100"]),
    (
        "--early-stopping-patience 3 --eval-interval 5 --eval-iters 0",
        1,
        {"--early-stopping-patience", "--eval-iters"},
        ["--eval-iters is 0"],
        ["--eval-iters 100"],
    ),
    ("--train-samples 64", 1, {"--train-iters", "--train-samples"}, ["exclude each other"], ["--train-samples None"]),
    (
        "--global-batch-size 10",
        2,
        {"--global-batch-size", "--micro-batch-size"},
        ["--global-batch-size 10 is not divisible by --micro-batch-size 2 x 2 data ranks = 4"],
        ["--global-batch-size 8", "--global-batch-size 12", "--micro-batch-size 1"],
    ),
    ("--rampup-batch-size 2 2 100", 1, {"--rampup-batch-size", "--global-batch-size"}, ["needs --global-batch-size"], []),
    (
        "--rampup-batch-size 2 4 100 --global-batch-size 16",
        2,
        {"--rampup-batch-size", "--micro-batch-size"},
        ["START and INCREMENT are not both divisible by --micro-batch-size 2 x 2 data ranks = 4"],
        ["--rampup-batch-size 4 4 100"],
    ),
    (
        "--rampup-batch-size 4 2 100 --global-batch-size 16",
        2,
        {"--rampup-batch-size"},
        ["START and INCREMENT"],
        ["--rampup-batch-size 4 4 100"],
    ),
    (
        "--rampup-batch-size 16 4 100 --global-batch-size 16",
        2,
        {"--rampup-batch-size"},
        ["starts at 16, which is not below --global-batch-size 16"],
        ["--rampup-batch-size 12 4 100"],
    ),
    (
        "--rampup-batch-size 4 8 100 --global-batch-size 24",
        2,
        {"--rampup-batch-size"},
        ["24 - 4 is not divisible by 8"],
        ["--rampup-batch-size 4 4 100", "--global-batch-size 20", "--global-batch-size 28"],
    ),
    ("--init-method tcp://host", 2, {"--init-method"}, ["is not a valid rendezvous"], ["--init-method env://"]),
    ("--init-method file://here", 2, {"--init-method"}, ["is not a valid rendezvous"], ["--init-method env://"]),
    (
        "--step-batch-size-schedule 0:4,1K:8 --global-batch-size 16",
        2,
        {"--step-batch-size-schedule", "--global-batch-size"},
        ["ends with a batch of 8, and --global-batch-size is 16"],
        ["--global-batch-size 8"],
    ),
    (
        "--step-batch-size-schedule 0:4,1K:8 --rampup-batch-size 4 4 100 --global-batch-size 8",
        2,
        {"--step-batch-size-schedule", "--rampup-batch-size"},
        ["exclude each other"],
        [],
    ),
    (
        "--step-batch-size-schedule 0:2,1K:6,3M:8,4M:16",
        2,
        {"--step-batch-size-schedule", "--micro-batch-size"},
        ["0:2, 1K:6 are not divisible by --micro-batch-size 2 x 2 data ranks = 4"],
        ["--step-batch-size-schedule '0:8 4M:16'", "--step-batch-size-schedule '0:4 1K:8 3M:8 4M:16'"],
    ),
    (
        "--step-batch-size-schedule 0:4,3:8",
        1,
        {"--step-batch-size-schedule", "--seq-length"},
        ["0:4 and 3:8 start at the same sample"],
        ["--step-batch-size-schedule 0:8"],
    ),
    *(
        (f"--step-batch-size-schedule {words}", 1, {"--step-batch-size-schedule"}, [said], [])
        for words, said in {
            "1K:4 2K:8": "does not define the batch size before 1K:4. The first entry must start at 0, such as 0:4",
            "0:4 1K:2": "lowers the batch size from 0:4 to 1K:2",
            "0:4 1K:8 0.001M:16": "has two batch sizes that start at the same token, 1K:8 and 1K:16",
            "0:4 8": "has the entry '8', which is not of the form TOKENS:BATCH",
            "0:4 1X:8": "has the entry '1X:8', which is not of the form TOKENS:BATCH",
            "0:0": "has the entry '0:0', whose batch size is not a whole number of at least 1",
            "0:1.5": "has the entry '0:1.5', whose batch size is not a whole number of at least 1",
        }.items()
    ),
    (
        "--train-iters None --train-samples 3 --step-batch-size-schedule 0:4,80:8",
        1,
        {"--train-samples"},
        ["one step of 4 sequences"],
        ["--train-samples 4"],
    ),
    (
        "--train-iters None --train-samples 7 --global-batch-size 8",
        1,
        {"--train-samples"},
        ["less than one step of 8 sequences"],
        ["--train-samples 8"],
    ),
    ("--train-iters None --train-samples 3", 2, {"--train-samples"}, ["one step of 4 sequences"], ["--train-samples 4"]),
    (
        "--train-iters None --train-samples 3 --rampup-batch-size 4 4 10 --global-batch-size 8",
        1,
        {"--train-samples"},
        ["one step of 4 sequences"],
        ["--train-samples 4"],
    ),
    (
        "--iterations-to-skip 5 101 200",
        1,
        {"--iterations-to-skip", "--train-iters"},
        ["names 101, 200, but the run ends at --train-iters 100"],
        ["--iterations-to-skip 5"],
    ),
    (
        "--profile --profile-step-start 12",
        1,
        {"--profile-step-start", "--profile-step-end"},
        ["--profile-step-end 12 is not above --profile-step-start 12"],
        ["--profile-step-end 13", "--profile-step-start 11"],
    ),
    (
        "--profile --profile-step-start 101 --profile-step-end 103",
        1,
        {"--profile-step-start", "--train-iters"},
        ["is beyond --train-iters 100"],
        ["--profile-step-start 100"],
    ),
    (
        "--profile-pipeline --profile-step-start 101",
        1,
        {"--profile-step-start", "--profile-pipeline", "--train-iters"},
        ["is beyond --train-iters 100", "--profile-pipeline would record nothing"],
        ["--profile-step-start 100"],
    ),
    # schedules
    (
        "--lr-decay-samples 50",
        1,
        {"--lr-decay-samples", "--train-iters"},
        ["--lr-decay-samples 50 cannot be used with --train-iters", "--lr-decay-iters"],
        [],
    ),
    ("--lr-warmup-samples 50", 1, {"--lr-warmup-samples", "--train-iters"}, ["use --lr-warmup-iters"], []),
    (
        "--train-iters None --train-samples 640 --lr-decay-style WSD --lr-wsd-decay-iters 3",
        1,
        {"--lr-wsd-decay-iters", "--train-samples"},
        ["use --lr-wsd-decay-samples"],
        [],
    ),
    (
        "--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
        1,
        {"--lr-warmup-iters", "--lr-warmup-fraction"},
        ["exclude each other"],
        ["--lr-warmup-fraction None", "--lr-warmup-iters 0"],
    ),
    ("--lr-decay-iters 50 --lr-decay-samples 5", 1, {"--lr-decay-iters"}, ["exclude each"], ["--lr-decay-samples None"]),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-samples 5",
        1,
        {"--lr-wsd-decay-iters", "--lr-wsd-decay-samples"},
        ["exclude each other"],
        ["--lr-wsd-decay-samples None"],
    ),
    ("--min-lr 0.01", 1, {"--min-lr", "--lr"}, ["--min-lr 0.01 is above --lr 0.001"], ["--min-lr 0.001", "--lr 0.01"]),
    (
        "--decoupled-lr 0.01 --decoupled-min-lr 0.1",
        1,
        {"--decoupled-min-lr", "--decoupled-lr"},
        ["--decoupled-min-lr 0.1 is above --decoupled-lr 0.01"],
        ["--decoupled-min-lr 0.01", "--decoupled-lr 0.1"],
    ),
    (
        "--decoupled-lr 1e-5 --min-lr 1e-4",
        1,
        {"--decoupled-lr", "--min-lr"},
        ["is below --min-lr 0.0001, at which its decay ends"],
        ["--decoupled-min-lr 1e-05"],
    ),
    (
        "--lr-rewarm-start-iters 90 --lr-rewarm-iters 20",
        1,
        {"--lr-rewarm-start-iters", "--train-iters"},
        ["and a warm-up of 20 leave nothing of the 100 iters of the run"],
        ["--lr-rewarm-iters 9", "--train-iters 111"],
    ),
    (
        "--lr-rewarm-start-iters 9 --lr-rewarm-start-samples 20",
        1,
        {"--lr-rewarm-start-iters", "--lr-rewarm-start-samples"},
        ["exclude each other"],
        ["--lr-rewarm-start-samples None"],
    ),
    ("--mup-base-kv-channels 4", 1, {"--mup-base-kv-channels"}, ["acts only with --mup-base-width"], []),
    (
        "--mup-base-width 48 --mup-base-kv-channels 4 --softmax-scale 0.5",
        1,
        {"--mup-base-kv-channels", "--softmax-scale"},
        ["exclude each other"],
        ["--softmax-scale None"],
    ),
    (
        "--mup-base-width 48 --mup-base-kv-channels 4 --multi-latent-attention",
        1,
        {"--mup-base-kv-channels", "--multi-latent-attention"},
        ["exclude each other"],
        ["--no-multi-latent-attention"],
    ),
    (
        "--qk-clip --qk-layernorm",
        1,
        {"--qk-clip", "--qk-layernorm"},
        ["--qk-clip cannot reduce attention scores with --qk-layernorm"],
        ["--no-qk-clip", "--no-qk-layernorm"],
    ),
    (
        "--log-gradient-noise",
        1,
        {"--log-gradient-noise", "--micro-batch-size"},
        ["needs steps of several microbatches, but the batch is one microbatch of 2 sequences"],
        ["--global-batch-size 4"],
    ),
    (
        "--mup-base-width 24 --optimizer lamb",
        1,
        {"--mup-base-width", "--optimizer"},
        ["does not support the optimizer lamb", "muP scales the learning rates of adam, adam8bit, lion, ademamix, sgd"],
        ["--mup-base-width None"],
    ),
    (
        f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --param-groups '*.router.bias lr-mult=0'",
        1,
        {"--param-groups"},
        ["layers.0.mlp.router.bias is updated from the assignments to experts", "--moe-router-bias-update-rate"],
        [],
    ),
    ("--param-groups 'norm.* lr-mult=2'", 1, {"--param-groups"}, ["no parameter has a name like norm.*"], []),
    ("--param-groups '* optimizer=sgd adam-eps=1'", 1, {"--param-groups"}, ["act only on parameters that adam"], []),
    ("--lr-warmup-init 1 --lr-warmup-iters 5", 1, {"--lr-warmup-init", "--lr"}, ["above --lr"], ["--lr-warmup-init 0.001"]),
    (
        "--lr-warmup-iters 100",
        1,
        {"--lr-warmup-iters", "--train-iters"},
        ["is not below the 100 iters of the decay"],
        ["--lr-warmup-iters 99", "--lr-decay-iters 101"],
    ),
    ("--lr-warmup-iters 50 --lr-decay-iters 40", 1, {"--lr-decay-iters"}, ["the 40 iters"], ["--lr-decay-iters 51"]),
    (
        "--train-iters None --train-samples 640 --lr-warmup-samples 640",
        1,
        {"--lr-warmup-samples", "--train-samples"},
        ["the 640 samples"],
        ["--lr-warmup-samples 639"],
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 91 --lr-warmup-iters 10",
        1,
        {"--lr-wsd-decay-iters"},
        ["does not fit after a warm-up of 10 into the 100 iters"],
        ["--lr-wsd-decay-iters 90"],
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 80 --lr-warmup-fraction 0.25",
        1,
        {"--lr-wsd-decay-iters"},
        ["after a warm-up of 25"],
        ["--lr-wsd-decay-iters 75"],
    ),
    ("--lr-decay-style WSD", 1, {"--lr-decay-style"}, ["needs the length of its final decay"], []),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.1",
        1,
        {"--weight-decay-incr-style", "--end-weight-decay"},
        ["cosine needs --end-weight-decay."],
        ["--end-weight-decay 0.01"],
    ),
    (
        "--weight-decay-incr-style linear",
        1,
        {"--start-weight-decay", "--end-weight-decay"},
        ["needs --start-weight-decay and --end-weight-decay"],
        ["--start-weight-decay 0.01 --end-weight-decay 0.01", "--weight-decay-incr-style constant"],
    ),
    ("--fp16 --bf16", 1, {"--fp16", "--bf16"}, ["--fp16 and --bf16 exclude"], ["--no-bf16", "--no-fp16"]),
    ("--bf16 --fp64", 1, {"--fp64", "--bf16"}, ["exclude each other"], ["--no-fp64", "--no-bf16"]),
    (
        "--fp16 --min-loss-scale 8 --initial-loss-scale 4",
        1,
        {"--min-loss-scale", "--initial-loss-scale"},
        ["8.0 is above --initial-loss-scale 4.0"],
        ["--min-loss-scale 4.0", "--initial-loss-scale 8.0"],
    ),
    (
        "--use-apex --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        1,
        {"--use-apex", "--optimizer-cpu-offload"},
        ["--use-apex and --optimizer-cpu-offload exclude each other", "only float32 parameters on CUDA devices"],
        ["--no-use-apex", "--optimizer-offload-fraction 1.0 --no-optimizer-cpu-offload"],
    ),
    ("--use-apex --device cpu", 1, {"--use-apex", "--device"}, ["--use-apex and --device cpu"], ["--no-use-apex", "--device cuda"]),
    ("--use-apex --fp64", 1, {"--use-apex", "--fp64"}, ["updates only float32 parameters"], ["--no-use-apex", "--no-fp64"]),
    # data
    ("--no-mock-data", 1, {"--data-path", "--mock-data"}, ["--data-path is missing"], ["--mock-data"]),
    ("--data-path corpus", 1, {"--data-path", "--mock-data"}, ["exclude each other"], ["--no-mock-data"]),
    ("--no-mock-data --data-path 0.5 a b", 1, {"--data-path"}, ["value 3, 'b', should be a weight", "./b"], []),
    ("--no-mock-data --data-path a 0.5", 1, {"--data-path"}, ["value 1, 'a', should be a weight"], []),
    ("--no-mock-data --data-path 1 a 2", 1, {"--data-path"}, ["the last weight, 2, has no prefix"], []),
    ("--no-mock-data --data-path -1 a 2 b", 1, {"--data-path"}, ["the weight of a is -1.0"], []),
    ("--no-mock-data --data-path 0 a 0 b", 1, {"--data-path"}, ["all weights are 0"], []),
    (
        "--no-mock-data --data-path a --data-args-path f",
        1,
        {"--data-path", "--data-args-path"},
        ["--data-path and --data-args-path exclude each other"],
        ["--data-path", "--data-args-path None"],
    ),
    (
        "--skip-train --eval-iters 0",
        1,
        {"--skip-train", "--eval-iters"},
        ["has nothing to evaluate"],
        ["--no-skip-train"],
    ),
    ("--full-validation", 1, {"--full-validation", "--mock-data"}, ["cannot be used with --mock-data"], ["--no-full-validation"]),
    (
        "--no-mock-data --hf-dataset a --hf-valid-documents 5 --eval-iters 2 --full-validation",
        1,
        {"--full-validation", "--hf-dataset"},
        ["--full-validation cannot be used with validation texts of --hf-dataset"],
        ["--no-full-validation"],
    ),
    ("--no-mock-data --train-data-path a --valid-data-path b c=d", 1, {"--valid-data-path"}, ["b has no name, but c has one"], []),
    (
        "--no-mock-data --train-data-path a --eval-iters 2",
        1,
        {"--train-data-path", "--valid-data-path", "--eval-iters"},
        ["without --valid-data-path"],
        ["--eval-iters 0"],
    ),
    (
        "--no-mock-data --valid-data-path a",
        1,
        {"--train-data-path", "--valid-data-path"},
        ["--valid-data-path is given, but --train-data-path is not"],
        [],
    ),
    (
        "--hf-dataset a",
        1,
        {"--mock-data", "--hf-dataset"},
        ["--mock-data and --hf-dataset exclude each other"],
        ["--no-mock-data"],
    ),
    (
        "--no-mock-data --hf-dataset a --eval-iters 2",
        1,
        {"--hf-dataset", "--hf-valid-documents", "--eval-iters"},
        ["without validation data"],
        ["--hf-valid-documents 1000"],
    ),
    (
        "--no-mock-data --hf-dataset a --eval-iters 0 --data-order megatron",
        1,
        {"--data-order", "--hf-dataset"},
        ["--data-order megatron cannot be used with --hf-dataset"],
        ["--data-order epoch"],
    ),
    ("--split 1,2,3,4", 1, {"--split"}, ["is not a list of fractions"], ["--split 969,30,1"]),
    ("--split 90,-5", 1, {"--split"}, ["is not a list of fractions"], []),
    ("--split 90,x", 1, {"--split"}, ["is not a list of fractions"], []),
    ("--split 0,0,0", 1, {"--split"}, ["is not a list of fractions"], []),
    ("--split nan,1", 1, {"--split"}, ["is not a list of fractions"], []),
    ("--split 0,50,50", 1, {"--split"}, ["leaves no documents for training"], []),
    ("--vocab-size None", 1, {"--tokenizer-type", "--vocab-size"}, ["NullTokenizer needs --vocab-size"], []),
    (
        "--vocab-size None --tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        {"--tokenizer-type", "--merge-file"},
        ["GPT2BPETokenizer needs --merge-file."],
        [],
    ),
    ("--vocab-size None --tokenizer-type Llama2Tokenizer", 1, {"--tokenizer-model"}, ["needs --tokenizer-model"], []),
    # checkpoints
    (
        "--save s --save-interval 10 --save-retain-interval 25",
        1,
        {"--save-retain-interval", "--save-interval"},
        ["25 is not divisible by --save-interval 10"],
        ["--save-retain-interval 20", "--save-retain-interval 30"],
    ),
    (
        "--load l --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        1,
        {"--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"},
        ["exclude each other"],
        ["--no-override-opt-param-scheduler"],
    ),
    (
        "--load l --override-opt-param-scheduler --resume-schedule saved",
        1,
        {"--override-opt-param-scheduler", "--resume-schedule"},
        ["exclude each other"],
        ["--no-override-opt-param-scheduler"],
    ),
    (
        "--load l --finetune --use-checkpoint-opt-param-scheduler",
        1,
        {"--finetune", "--use-checkpoint-opt-param-scheduler"},
        ["exclude each other"],
        ["--no-finetune"],
    ),
    (
        "--bf16 --fp8-format e4m3 --kv-channels 8 --num-attention-heads 11",
        1,
        {"--fp8-format", "--fp8-recipe", "--num-attention-heads", "--kv-channels", "--tensor-model-parallel-size"},
        [
            "--fp8-format e4m3 --fp8-recipe tensorwise cannot be used with 264 rows of queries, keys and values on a tensor rank, "
            "which is no multiple of 16"
        ],
        ["--num-attention-heads 16", "--fp8-format None"],
    ),
    (
        f"--bf16 --fp8-format e4m3 {LATENT} --kv-lora-rank 24",
        1,
        {"--fp8-format", "--fp8-recipe", "--kv-lora-rank"},
        ["with 24 channels of the latent of keys and values, which is no multiple of 16"],
        ["--kv-lora-rank 16", "--kv-lora-rank 32"],
    ),
    (
        f"--bf16 --fp8-format e4m3 {LATENT} --seq-length 16 --tensor-model-parallel-size 4 --sequence-parallel",
        4,
        {"--fp8-format", "--micro-batch-size", "--seq-length", "--tensor-model-parallel-size"},
        ["with 8 tokens of a microbatch on a tensor rank, which is no multiple of 16"],
        ["--micro-batch-size 4"],
    ),
    (
        "--bf16 --fp8-format hybrid --fp8-recipe blockwise",
        1,
        {"--fp8-format", "--fp8-recipe", "--hidden-size"},
        ["with 96 hidden channels, which is no multiple of 128"],
        ["--fp8-recipe tensorwise"],
    ),
    (
        "--bf16 --fp8-format hybrid --seq-length 12 --tensor-model-parallel-size 2",
        2,
        {"--fp8-format", "--micro-batch-size", "--seq-length"},
        ["with 24 tokens of a microbatch, which is no multiple of 16"],
        ["--micro-batch-size 4"],
    ),
    (
        "--bf16 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 2",
        1,
        {"--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"},
        ["leave no layer of --num-layers 4 in FP8"],
        [],
    ),
    (
        "--bf16 --fp8-format e4m3 --tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
        2,
        {"--fp8-format", "--tp-comm-overlap"},
        ["exclude each other"],
        ["--no-tp-comm-overlap"],
    ),
    # settings that would do nothing
    ("--q-lora-rank 8", 1, {"--q-lora-rank"}, ["only with --multi-latent-attention"], [LATENT]),
    ("--kv-lora-rank 8", 1, {"--kv-lora-rank"}, ["only with --multi-latent-attention"], [LATENT]),
    ("--qk-head-dim 8", 1, {"--qk-head-dim"}, ["only with --multi-latent-attention"], [LATENT]),
    ("--qk-pos-emb-head-dim 8", 1, {"--qk-pos-emb-head-dim"}, ["only with --multi-latent-attention"], [LATENT]),
    ("--v-head-dim 8", 1, {"--v-head-dim"}, ["only with --multi-latent-attention"], [LATENT]),
    ("--window-attn-skip-freq 4", 1, {"--window-attn-skip-freq"}, ["only with --window-size"], []),
    ("--rotary-base-local 1e4 --window-size 7,0", 1, {"--rotary-base-local"}, ["only with --window-size and"], []),
    (
        "--qk-layernorm-all-heads --normalization RMSNorm",
        1,
        {"--qk-layernorm-all-heads"},
        ["only with --qk-layernorm"],
        ["--qk-layernorm"],
    ),
    (
        "--rope-scaling-factor 4 --position-embedding-type rope",
        1,
        {"--rope-scaling-factor"},
        ["4.0 would have no effect"],
        ["--use-rope-scaling"],
    ),
    ("--fp8-format hybrid", 1, {"--fp8-format"}, ["only with --bf16 or --fp64"], ["--bf16"]),
    ("--bf16 --fp8-recipe rowwise", 1, {"--fp8-recipe"}, ["only with --fp8-format"], []),
    (
        "--optimizer ademamix",
        1,
        {"--ademamix-warmup-iters", "--optimizer"},
        ["needs --ademamix-warmup-iters"],
        ["--ademamix-warmup-iters 100"],
    ),
    (
        "--cpu-offloading --cpu-offloading-num-layers 5",
        1,
        {"--cpu-offloading-num-layers", "--num-layers"},
        ["no more layers to offload"],
        ["--cpu-offloading-num-layers 4"],
    ),
    (
        "--recompute-granularity full --recompute-activations",
        1,
        {"--recompute-activations", "--recompute-granularity"},
        ["contradicts --recompute-granularity full"],
        ["--no-recompute-activations"],
    ),
    (
        "--recompute-activations --recompute-modules mlp layernorm mlp_act",
        1,
        {"--recompute-modules"},
        ["mlp includes mlp_act"],
        ["--recompute-modules mlp layernorm", "--recompute-modules layernorm mlp_act"],
    ),
    (
        "--attention-backend flash --device cpu",
        1,
        {"--attention-backend"},
        ["flash has no dropout on a CPU"],
        ["--attention-backend auto", "--attention-backend math"],
    ),
    (
        "--attention-backend flash",
        1,
        {"--attention-backend"},
        ["flash computes in 16 bits, not in 32"],
        ["--attention-backend auto", "--attention-backend math"],
    ),
    (
        "--attention-backend fused --device cuda --bf16",
        1,
        {"--attention-backend"},
        ["fused (cudnn) drops multiples of 1/16, not 0.1"],
        ["--attention-backend auto", "--attention-backend flash"],
    ),
    (
        "--recompute-activations --recompute-modules",
        1,
        {"--recompute-modules"},
        ["names no module"],
        ["--recompute-modules core_attn"],
    ),
    (
        "--recompute-granularity full --recompute-num-layers 5",
        1,
        {"--recompute-num-layers"},
        ["--recompute-num-layers 5 is above --num-layers 4"],
        ["--recompute-num-layers 4"],
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-layers-per-stage 5,x --pipeline-model-parallel-size 2",
        2,
        {"--recompute-layers-per-stage"},
        ["takes auto, or a number of layers, 0 to 4, for each of 2 pipeline stages"],
        ["--recompute-layers-per-stage 1,1"],
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-layers-per-stage 5 --pipeline-model-parallel-size 2",
        2,
        {"--recompute-layers-per-stage"},
        ["cannot be used"],
        ["--recompute-layers-per-stage 4,4"],
    ),
    (
        "--fsdp-shard-size 1",
        1,
        {"--fsdp-shard-size"},
        ["--fsdp-shard-size 1 would have no effect", "only with --data-parallel-sharding-strategy optim_grads_params"],
        ["--data-parallel-sharding-strategy optim_grads_params"],
    ),
    (
        "--fsdp-reshard-after-forward never --data-parallel-sharding-strategy optim_grads",
        1,
        {"--fsdp-reshard-after-forward"},
        ["--fsdp-reshard-after-forward never would have no effect"],
        ["--data-parallel-sharding-strategy optim_grads_params"],
    ),
    *(
        (
            f"{flag} --data-parallel-sharding-strategy optim",
            2,
            {flag},
            [f"{flag} would have no effect"],
            ["--data-parallel-sharding-strategy optim_grads_params"],
        )
        for flag in ("--fsdp-reduce-once", "--fsdp-params-cpu")
    ),
    (
        "--compile --compile-mode reduce-overhead",
        1,
        {"--compile-mode"},
        ["--compile-mode reduce-overhead cannot be used", "record CUDA graphs"],
        ["--compile-mode max-autotune-no-cudagraphs", "--compile-mode default"],
    ),
    (
        "--compile --recompute-activations --recompute-modules core_attn layernorm",
        1,
        {"--compile", "--recompute-modules"},
        ["--compile cannot be used with", "decides which tensors of a compiled layer"],
        ["--recompute-modules core_attn", "--no-compile"],
    ),
    (
        "--pretrained-checkpoint base --load run --finetune",
        1,
        {"--pretrained-checkpoint", "--finetune"},
        ["exclude each other"],
        ["--no-finetune", "--pretrained-checkpoint None"],
    ),
    (
        "--pretrained-checkpoint base --load run --exit-on-missing-checkpoint",
        1,
        {"--pretrained-checkpoint", "--exit-on-missing-checkpoint"},
        ["the first flag starts a run"],
        ["--no-exit-on-missing-checkpoint", "--pretrained-checkpoint None"],
    ),
    (
        "--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
        1,
        {"--use-rope-scaling", "--rotary-seq-len-interpolation-factor"},
        ["exclude each other"],
        ["--no-use-rope-scaling", "--rotary-seq-len-interpolation-factor 1.0"],
    ),
    (
        "--position-embedding-type rope --rope-type yarn --use-rope-scaling",
        1,
        {"--rope-type", "--use-rope-scaling"},
        ["exclude each other"],
        ["--no-use-rope-scaling", "--rope-type rope"],
    ),
    (
        "--position-embedding-type rope --use-rope-scaling --rope-low-freq-factor 8",
        1,
        {"--rope-low-freq-factor", "--rope-high-freq-factor"},
        ["is not below"],
        ["--rope-low-freq-factor 1.0", "--rope-high-freq-factor 32.0"],
    ),
    (
        "--position-embedding-type rope --rope-type yarn --beta-slow 32",
        1,
        {"--beta-slow", "--beta-fast"},
        ["--beta-slow 32.0 is not below --beta-fast 32.0"],
        ["--beta-slow 1.0", "--beta-fast 1024.0"],
    ),
    (
        "--position-embedding-type rope --rope-type yarn --rotary-base 1",
        1,
        {"--rope-type", "--rotary-base"},
        ["frequencies do not decrease"],
        ["--rotary-base 10000.0", "--rope-type rope"],
    ),
    (
        "--position-embedding-type rope --rope-type dynamic --rotary-percent 0.25",
        1,
        {"--rope-type", "--kv-channels"},
        ["one rotated pair"],
        ["--rope-type rope"],
    ),
    (
        "--position-embedding-type rope --rope-type longrope --rope-short-factors 2 2 2 2",
        1,
        {"--rope-long-factors", "--rope-type"},
        ["--rope-long-factors has 0 factors, but 4 pairs"],
        ["--rope-type rope --rope-short-factors"],
    ),
    (
        "--position-embedding-type rope --rope-low-freq-factor 2",
        1,
        {"--rope-low-freq-factor"},
        ["only with --use-rope-scaling"],
        ["--use-rope-scaling"],
    ),
    (
        "--position-embedding-type rope --rope-high-freq-factor 8",
        1,
        {"--rope-high-freq-factor"},
        ["only with --use-rope-scaling"],
        ["--use-rope-scaling"],
    ),
    (
        "--position-embedding-type rope --rotary-scaling-factor 4",
        1,
        {"--rotary-scaling-factor"},
        ["only with --rope-type yarn or dynamic or longrope"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --original-max-position-embeddings 64",
        1,
        {"--original-max-position-embeddings"},
        ["only with --rope-type yarn or dynamic or longrope"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --beta-fast 4",
        1,
        {"--beta-fast"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --beta-slow 2",
        1,
        {"--beta-slow"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --no-yarn-correction-range-round-to-int",
        1,
        {"--yarn-correction-range-round-to-int"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --mscale 2",
        1,
        {"--mscale"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --mscale-all-dim 1",
        1,
        {"--mscale-all-dim"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --rope-attention-factor 2",
        1,
        {"--rope-attention-factor"},
        ["only with --rope-type yarn"],
        ["--rope-type yarn"],
    ),
    (
        "--position-embedding-type rope --rope-short-factors 2",
        1,
        {"--rope-short-factors"},
        ["only with --rope-type longrope"],
        [],
    ),
    (
        "--position-embedding-type rope --rope-long-factors 2",
        1,
        {"--rope-long-factors"},
        ["only with --rope-type longrope"],
        [],
    ),
    ("--plan-cluster cpu", 1, {"--plan-cluster"}, ["only with --plan-report"], []),
    ("--ckpt-step 5", 1, {"--ckpt-step"}, ["only with --load"], []),
    ("--ckpt-step best", 1, {"--ckpt-step"}, ["only with --load"], []),
    ("--keep-best --eval-interval 5", 1, {"--keep-best"}, ["only with --save"], []),
    ("--finetune", 1, {"--finetune"}, ["only with --load"], []),
    ("--use-checkpoint-args", 1, {"--use-checkpoint-args"}, ["only with --load or --pretrained-checkpoint"], []),
    ("--exit-on-missing-checkpoint", 1, {"--exit-on-missing-checkpoint"}, ["only with --load"], []),
    ("--swiglu --glu-linear-offset 1", 1, {"--glu-linear-offset"}, ["only with --quick-geglu"], []),
    ("--activation-func-clamp-value 7", 1, {"--activation-func-clamp-value"}, ["only with --quick-geglu"], []),
    ("--memory-save-interval 5", 1, {"--memory-save-interval"}, ["only with --save"], []),
    ("--save x --replicate-state 1", 1, {"--replicate-state"}, ["only with --memory-save-interval"], []),
    ("--hang-warn-s 0 --straggler-interval 5", 1, {"--straggler-interval"}, ["with a --hang-warn-s other than 0"], []),
    (
        "--spike-policy rewind --save run",
        1,
        {"--spike-policy", "--save-interval"},
        ["needs --save-interval."],
        ["--spike-policy skip"],
    ),
    (
        "--spike-policy rewind --save run --save-interval 5 --no-save-optim",
        1,
        {"--spike-policy", "--save-optim"},
        ["optimizer state"],
        ["--spike-policy skip", "--save-optim"],
    ),
    (
        "--spike-policy rewind --save run --save-interval 5 --data-order megatron",
        1,
        {"--spike-policy", "--data-order"},
        ["whose order depends"],
        ["--spike-policy skip", "--data-order epoch"],
    ),
    ("--hang-warn-s 0 --hang-kill-s 60", 1, {"--hang-kill-s"}, ["with a --hang-warn-s other than 0"], []),
    ("--whole-documents", 1, {"--whole-documents"}, ["--reset-attention-mask"], ["--reset-attention-mask"]),
    (
        "--whole-documents --reset-attention-mask",
        1,
        {"--whole-documents", "--mock-data"},
        ["have no documents"],
        ["--no-whole-documents"],
    ),
    (
        "--no-mock-data --data-path x --whole-documents --reset-attention-mask --data-order megatron",
        1,
        {"--whole-documents", "--data-order"},
        ["windows"],
        ["--data-order epoch"],
    ),
    ("--lora-alpha 8", 1, {"--lora-alpha"}, ["--lora-rank"], []),
    ("--lora-targets mlp.up", 1, {"--lora-targets"}, ["--lora-rank"], []),
]


def test_a_broken_rule_is_reported() -> None:
    every(CASES, check_case)


def test_each_rule_has_a_case() -> None:
    check_rules_have_cases([rule for rule in RULES if rule not in (*PIPELINE_RULES, *SHARDING_RULES, *LORA_RULES)], CASES)


IDLE = """
--mtp-loss-scaling-factor 0.3
--moe-token-dispatcher-type allgather
--num-experts 8 --disable-bias-linear --moe-router-bias-update-rate 1
--decoupled-min-lr 0.01
--lr-rewarm-iters 5
--lr-rewarm-samples 5
--lr-rewarm-factor 2
--data-order megatron
--allow-tokenizer-mismatch
--multiple-validation-sets
--no-mock-data --data-path corpus --full-validation --eval-iters 3
--skip-train --save x
--skip-train --sample-interval 5
--skip-train --early-stopping-patience 2
--num-query-groups 4
--rotary-base 500
--rotary-percent 0.5
--no-rope-freq 4
--use-rope-scaling
--loss-scale 8
--bf16 --first-last-layers-bf16
--num-layers-at-start-in-bf16 2
--num-layers-at-end-in-bf16 0
--bf16 --fp32-matmul-precision high
--fp64 --fp32-matmul-precision high
--bf16 --hysteresis 3
--fp16 --loss-scale 8 --initial-loss-scale 4
--fp16 --loss-scale 8 --min-loss-scale 4
--loss-scale-window 10
--optimizer sgd --adam-beta1 0.8
--optimizer sgd --adam-beta2 0.8
--optimizer sgd --adam-eps 0.8
--sgd-momentum 0.8
--optimizer lion --use-apex
--optimizer adafactor --adafactor-least-scale 0.1
--ademamix-beta3 0.99
--ademamix-alpha 2
--lr-wsd-decay-iters 3
--lr-wsd-decay-style linear
--train-iters None --train-samples 640 --lr-wsd-decay-samples 3
--lr-decay-style constant --min-lr 0.0001
--lr-decay-style constant --lr-decay-iters 5
--train-iters None --train-samples 640 --lr-decay-style constant --lr-decay-samples 5
--lr-warmup-init 0.0001
--start-weight-decay 0.1
--end-weight-decay 0.1
--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay 0.1
--recompute-method block
--recompute-num-layers 2
--recompute-granularity full --recompute-modules mlp
--recompute-granularity full --recompute-layers-per-stage auto
--overlap-grad-reduce --overlap-param-gather
--tensor-model-parallel-size 2 --tp-comm-overlap
--compile-backend aot_eager
--compile-cache-dir kernels
--compile-mode max-autotune-no-cudagraphs
--optimizer-offload-fraction 0.5
--optimizer-offload-fraction 0 --optimizer-cpu-offload
--rotary-interleaved
--rope-type yarn
--rotary-seq-len-interpolation-factor 2
--manual-gc-interval 5
--layer-costs c
--profile-step-start 5
--profile-step-end 15
--profile-ranks 1
--profile-dir p
--profile-pipeline --profile-step-end 15
--profile-pipeline --profile-ranks 1
--tensorboard-log-interval 5
--log-timers-to-tensorboard
--log-memory-to-tensorboard
--log-layer-norms
--wandb-exp-name x
--sample-prompts p
--sample-tokens 3
--sample-temperature 0.5
--trace-steps 3
--save-interval 5
--save-retain-interval 5
--async-save
--keep-last 5
--no-save-optim
--no-load-optim
--override-opt-param-scheduler
--use-checkpoint-opt-param-scheduler
--tokenizer-model m
--vocab-file v
--merge-file v
--tokenizer-type ByteTokenizer --vocab-size 100
--tiktoken-pattern v1
--tiktoken-num-special-tokens 3
--tiktoken-special-tokens a
--add-bos
--data-cache-path c
--hf-subset x
--hf-revision x
--hf-split x
--hf-text-column x
--hf-shuffle-buffer 5
--no-hf-streaming
--hf-valid-split x
--hf-valid-documents 5
--normalization RMSNorm --no-norm-bias
--no-norm-weight --apply-layernorm-1p
--qk-clip-threshold 50
--qk-clip-alpha 0.3
--data-loss-mask
--take-over
--early-stopping-min-delta 0.1
--sentinel-action warn
--spike-window 50
--spike-policy warn --spike-max-rewinds 5
--spike-threshold 5
--spike-policy skip --spike-batches-beyond 5
--lion-beta1 0.8
--lion-beta2 0.8
--ademamix-warmup-iters 8
--adam-8bit-block-size 8
--adafactor-decay-rate 0.7
--adafactor-clip-threshold 2
--adafactor-eps 1e-20
--adafactor-beta1 0.5
--adafactor-relative-step
--muon-momentum 0.8
--muon-use-nesterov
--muon-num-ns-steps 4
--muon-scale-mode shape_scaling
--muon-extra-scale-factor 0.2
--muon-no-split-qkv
--muon-split-heads
--muon-dtype fp32
--use-rope-scaling --rope-scaling-factor 4
--rope-type yarn --rotary-scaling-factor 4
--grad-reduce-in-bf16
--wandb-entity x
--wandb-save-dir x
--mlflow-tracking-uri http://host:5000
--mlflow-run-name x
--trackio-run-name x
--trackio-space-id me/space
--resume-schedule new
--tensorboard-tags megatron
"""
"""Settings that have no effect, and do no harm: the last one of each line."""


def idle_flag(words: list[str]) -> Flag:
    """The setting that does nothing."""
    flag = find_flag([word for word in words if word.startswith("--")][-1].removeprefix("--"))
    assert flag is not None
    return flag


def test_what_does_nothing_is_noted_and_taken_back() -> None:
    """Nothing behind the settings sees it, and the note says with what it acts."""

    def check(extra: str) -> None:
        loaded, flag = load(argv(extra), 2), idle_flag(argv(extra))
        assert get_value(loaded.config, flag.field) == flag.default
        (note,) = [note for note in loaded.notes if " no effect: " in note and f"{flag.name}" in note.split(" no effect: ")[0]]
        assert flag.metadata.active_if is not None and note.endswith(f" only {flag.metadata.active_if.description}.")

    every(IDLE.strip().splitlines(), check)


def test_each_setting_that_may_do_nothing_has_a_case() -> None:
    refused = {finding.fields[0] for case in CASES for finding in check_strict_conditions(config_of(case[0]), 1)}
    assert refused == {
        flag.field for flag in get_flags().values() if flag.metadata.active_if is not None and flag.metadata.active_if.strict
    }
    noted = {
        flag.field for flag in get_flags().values() if flag.metadata.active_if is not None and not flag.metadata.active_if.strict
    }
    assert {idle_flag(extra.split()).field for extra in IDLE.strip().splitlines()} >= noted


VALID = [
    ("", 1),
    (
        f"{EXPERTS} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --context-parallel-size 2",
        4,
    ),
    (f"{EXPERTS} --hidden-size 12 --swiglu --moe-ffn-hidden-size 8", 1),
    (
        f"{EXPERTS} --ffn-hidden-size 9 --moe-ffn-hidden-size 4 --moe-layer-freq [1]*4 --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        2,
    ),
    (f"{EXPERTS} --moe-layer-freq [0,1,1,0] --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2", 1),
    (f"{LATENT} --hidden-size 100 --q-lora-rank 7 --v-head-dim 5 --tensor-model-parallel-size 4 --sequence-parallel", 4),
    ("", 1_000_000),
    ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 3 --sequence-parallel --num-layers 7", 24),
    ("--pipeline-model-parallel-size 4", 4),
    ("--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 4", 8),
    ("--group-query-attention --num-query-groups 12", 1),
    ("--kv-channels 7 --hidden-size 100", 1),
    ("--position-embedding-type rope --rotary-percent 0.25 --rotary-base 5e5 --use-rope-scaling --rope-scaling-factor 4", 1),
    ("--position-embedding-type rope --max-position-embeddings 16", 1),
    ("--global-batch-size 8 --rampup-batch-size 4 4 100", 2),
    ("--global-batch-size 16 --step-batch-size-schedule 0:4,1K:8,2.5k:16", 2),
    ("--train-iters None --train-samples 640 --lr-decay-samples 600 --lr-warmup-samples 10 --global-batch-size 8", 2),
    ("--lr-warmup-fraction 0.1 --lr-warmup-init 1e-5 --lr-decay-iters 90 --min-lr 1e-3", 1),
    ("--lr-decay-style constant --lr-warmup-iters 200", 1),
    ("--lr-decay-style constant --lr-warmup-fraction 0.1 --lr-decay-iters 50", 1),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 90 --lr-wsd-decay-style cosine --lr-warmup-iters 10", 1),
    ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2", 1),
    ("--fp16 --initial-loss-scale 4 --min-loss-scale 4 --hysteresis 1 --loss-scale-window 10", 1),
    ("--fp16 --loss-scale 8", 1),
    ("--fp32-matmul-precision high", 1),
    ("--bf16 --fp8-format hybrid", 1),
    ("--bf16 --grad-reduce-in-bf16 --use-distributed-optimizer --overlap-grad-reduce", 2),
    ("--fp64 --fp8-format e4m3 --fp8-recipe rowwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 0", 1),
    ("--bf16 --fp8-format hybrid --fp8-recipe blockwise --hidden-size 512 --num-attention-heads 4 --seq-length 64", 1),
    ("--recompute-granularity full --recompute-num-layers 4", 1),
    ("--cpu-offload-activations --cpu-offloading-num-layers 4", 1),
    ("--recompute-activations --recompute-modules core_attn layernorm mlp", 1),
    ("--recompute-granularity selective --recompute-modules mlp_act", 1),
    ("--compile --recompute-granularity full --cpu-offload-activations --attention-dropout 0", 1),
    ("--compile --compile-mode max-autotune-no-cudagraphs --recompute-activations", 1),
    ("--attention-backend flash --bf16", 1),
    ("--attention-backend flash --attention-dropout 0 --device cpu --fp64", 1),
    ("--attention-backend fused --attention-dropout 0.125 --bf16", 1),
    ("--attention-backend unfused --deterministic-mode", 1),
    ("--recompute-granularity full --recompute-method block --recompute-layers-per-stage 4,0 --pipeline-model-parallel-size 2", 2),
    ("--optimizer sgd --sgd-momentum 0.5 --clip-grad 0", 1),
    ("--use-apex", 1),
    ("--use-apex --device cuda --bf16", 1),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 0.25", 1),
    (f"{DATA} --split '969, 30, 1'", 1),
    (f"{DATA} --split 1 --eval-iters 0", 1),
    ("--no-mock-data --hf-dataset a --hf-valid-documents 5 --eval-iters 2", 1),
    ("--no-mock-data --hf-dataset a --valid-data-path b --test-data-path c --eval-iters 2", 1),
    ("--no-mock-data --hf-dataset a --valid-data-path b --full-validation", 1),
    ("--split 100,0,0", 1),
    ("--save s --save-interval 10 --save-retain-interval 30 --keep-last 2 --no-save-optim", 1),
    ("--load l --ckpt-step best", 1),
    ("--save s --keep-best --keep-last 1 --eval-interval 5", 1),
    ("--early-stopping-patience 2 --early-stopping-min-delta 0.01 --eval-interval 5", 1),
    (f"{DATA} --train-iters None --train-epochs 0.5 --lr-warmup-iters 3 --lr-decay-iters 20", 1),
    (f"{DATA} --train-iters None --train-epochs 2 --lr-warmup-samples 3 --lr-decay-style WSD --lr-wsd-decay-samples 5", 1),
    ("--load l --ckpt-step 5 --finetune --no-load-optim --exit-on-missing-checkpoint", 1),
    ("--profile --profile-ranks 0 3 --profile-step-start 1 --profile-step-end 2 --profile-dir p", 4),
    ("--profile-pipeline --profile-step-start 100 --profile-dir p", 1),
    ("--profile-pipeline --profile --profile-step-start 5", 1),
    ("--vocab-size None --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m", 1),
    ("--vocab-size None --tokenizer-type SentencePieceTokenizer --tokenizer-model m", 1),
    ("--vocab-size None --tokenizer-type ByteTokenizer", 1),
    ("--device cuda --distributed-backend gloo", 1),
    ("--save-trace t --trace-steps 3 --check-replicas-every 2", 1),
    ("--sentinel-interval 5 --sentinel-action warn", 1),
    ("--tensorboard-dir t --log-timers-to-tensorboard --wandb-project p --wandb-exp-name n", 1),
    ("--wandb-project p --tensorboard-log-interval 5 --log-layer-norms", 1),
    ("--mlflow-experiment x --mlflow-tracking-uri u --mlflow-run-name n --tensorboard-log-interval 5 --log-layer-norms", 1),
    ("--trackio-project p --trackio-run-name n --trackio-space-id s --tensorboard-log-interval 5 --log-layer-norms", 1),
    ("--metrics-file f --log-layer-norms", 1),
]


def test_what_can_be_run_is_let_through() -> None:
    assert [(case, found) for case in VALID if (found := reported(*case))] == []


def test_what_is_required_is_named_together() -> None:
    found = find_violations(Config(), 1)
    missing = {flag for violation in found for flag in violation.flags if "missing" in violation.message}
    required = {f"--{flag.name}" for flag in get_flags().values() if flag.metadata.required}
    assert missing == {*required, *BASE, "--train-samples", "--train-epochs", "--data-path"} - {"--vocab-size"}
    assert len(found) == len(required) + 2


def test_every_number_has_a_range() -> None:
    for flag in get_flags().values():
        assert (flag.metadata.interval is not None) == (flag.value_type in (int, float)), flag.name


def test_defaults_lie_in_their_ranges() -> None:
    for flag in get_flags().values():
        interval = flag.metadata.interval
        if interval is not None and flag.default not in (None, 0) and not isinstance(flag.default, tuple):
            assert interval.contains(flag.default), flag.name


def test_all_violations_are_reported_together() -> None:
    """Many things wrong at once: none hides another."""
    extra = (
        "--hidden-size 100 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 5 --context-parallel-size 2 --fp16 --bf16 "
        "--attention-dropout 3 --min-lr 1 --train-samples 10 --data-path x --keep-last 2 --seq-length 33 --sequence-parallel "
        "--split x --swiglu --squared-relu --num-query-groups 4 --ffn-hidden-size 13 --max-position-embeddings 7"
    )
    found = reported(extra, 7)
    assert len(found) == 15
    with pytest.raises(ConfigError) as caught:
        load(argv(extra), 7)
    assert caught.value.violations == tuple(found)
    assert str(caught.value).startswith("15 problems in the settings:")


def test_the_message_reads_like_a_sentence() -> None:
    (violation,) = reported("--tensor-model-parallel-size 8", 8)
    assert str(ConfigError([violation])) == (
        "--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 8.\n"
        "  Each tensor rank holds whole heads. Nearest valid: --tensor-model-parallel-size 4 or 2, --num-attention-heads 16 or 8."
    )


def test_a_world_of_a_million_is_answered() -> None:
    found = reported("--tensor-model-parallel-size 7 --pipeline-model-parallel-size 3 --global-batch-size 1000003", 1_000_000)
    assert {"world size 999999", "world size 1000020"} <= {item for violation in found for item in violation.nearest}


_SETTINGS = [flag for flag in get_flags().values() if flag.value_type in (int, float) and flag.num_values == 1]


@given(
    values=st.dictionaries(
        st.sampled_from(_SETTINGS),
        st.one_of(
            st.none(), st.integers(-3, 40), st.sampled_from([10**18, 0.5, 1.5, float("nan"), float("inf"), -float("inf"), 2.0**200])
        ),
        max_size=12,
    ),
    switches=st.sets(st.sampled_from([flag for flag in get_flags().values() if flag.value_type is bool])),
    ramp=st.one_of(st.none(), st.tuples(*[st.integers(-1, 10)] * 3)),
    world_size=st.one_of(st.integers(-1, 64), st.just(10**7)),
    base=st.booleans(),
    strategy=st.sampled_from(get_args(ShardingStrategy)),
)
def test_rules_never_fail(
    values: dict[typing.Any, typing.Any],
    switches: set[typing.Any],
    ramp: tuple[int, int, int] | None,
    world_size: int,
    base: bool,
    strategy: str,
) -> None:
    """Whatever numbers are missing, zero, negative or huge, every rule answers."""
    config = parse(argv("")) if base else Config()
    for flag, value in values.items():
        if value is None and not flag.is_optional:
            continue
        if value is not None and flag.value_type is int and not isinstance(value, int):
            continue
        value = float(value) if value is not None and flag.value_type is float else value
        config = _with(config, flag.topic, flag.field, value)
    for flag in switches:
        config = _with(config, flag.topic, flag.field, not flag.default)
    config = _with(config, "training", "rampup_batch_size", ramp)
    config = _with(config, "parallel", "data_parallel_sharding_strategy", strategy)
    before = find_violations(config, world_size)
    for violation in before:
        assert violation.message.endswith(".")


def _with(config: Config, topic: str, field: str, value: object) -> Config:
    part = dataclasses.replace(getattr(config, topic), **{field: value})
    return dataclasses.replace(config, **{topic: part})  # type: ignore[arg-type]


NOTES = [
    ("--sequence-parallel", 1, "--sequence-parallel"),
    ("--overlap-grad-reduce --tensor-model-parallel-size 2", 2, "--overlap-grad-reduce"),
    ("--use-tp-pp-dp-mapping", 4, "--use-tp-pp-dp-mapping"),
    ("--use-tp-pp-dp-mapping --pipeline-model-parallel-size 4", 4, "--use-tp-pp-dp-mapping"),
    ("--fp32-residual-connection", 1, "--fp32-residual-connection"),
    ("--add-qkv-bias", 1, "--add-qkv-bias"),
    ("--multi-latent-attention --position-embedding-type rope --kv-channels 8", 1, "--kv-channels 8"),
    ("--multi-latent-attention --position-embedding-type rope --rotary-percent 0.5", 1, "--rotary-percent 0.5"),
    ("--position-embedding-type rope --max-position-embeddings 32", 1, "--max-position-embeddings 32"),
    ("--eval-iters 0 --eval-interval 10", 1, "--eval-interval 10"),
    (f"{DATA} --eval-iters 0 --multiple-validation-sets", 1, "--multiple-validation-sets"),
    (
        "--no-mock-data --hf-dataset a --hf-valid-documents 5 --eval-iters 2 --multiple-validation-sets",
        1,
        "--multiple-validation-sets",
    ),
    ("--split 99,1,0", 1, "--split 99,1,0"),
    ("--timing-log-option all", 1, "--timing-log-option all"),
    ("--log-timers-to-tensorboard --tensorboard-dir t", 1, "--log-timers-to-tensorboard"),
    ("--log-memory-to-tensorboard --tensorboard-dir t --device cpu", 1, "--log-memory-to-tensorboard"),
]


@pytest.mark.parametrize(("extra", "world_size", "setting"), NOTES)
def test_what_changes_nothing_is_noted(extra: str, world_size: int, setting: str) -> None:
    (note,) = list_idle_settings(config_of(extra), world_size)
    assert note.startswith(f"{setting} has no effect: ")


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        ("--sequence-parallel --overlap-grad-reduce --tensor-model-parallel-size 2", 4),
        ("--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2", 4),
        ("--fp32-residual-connection --bf16 --add-qkv-bias --disable-bias-linear", 1),
        ("--max-position-embeddings 64 --eval-interval 10", 1),
        (f"{DATA} --split 99,1,0", 1),
        ("--no-mock-data --hf-dataset a --valid-data-path b --eval-iters 2 --multiple-validation-sets", 1),
        ("--timing-log-level 1 --timing-log-option all --log-timers-to-tensorboard --tensorboard-dir t", 1),
        ("--log-memory-to-tensorboard --tensorboard-dir t --device cuda", 1),
    ],
)
def test_what_acts_is_not_noted(extra: str, world_size: int) -> None:
    assert list_idle_settings(config_of(extra), world_size) == []


def test_whether_a_setting_was_changed() -> None:
    config = parse(["--num-query-groups", "1", "--rotary-base", "5"])
    assert not is_set(config, "num_query_groups")
    assert is_set(config, "rotary_base")


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert find_divisors(number) == [part for part in range(1, number + 1) if number % part == 0]


@given(st.integers(0, 500), st.integers(1, 40))
def test_multiples_near(number: int, unit: int) -> None:
    found = find_multiples_near(number, unit)
    assert found == sorted(found)
    assert all(multiple > 0 and multiple % unit == 0 for multiple in found)
    assert number in found or number % unit or number == 0
    assert max(found) > number


def test_topics_are_the_parts_of_config() -> None:
    assert list(get_topics()) == [field.name for field in dataclasses.fields(Config)]
