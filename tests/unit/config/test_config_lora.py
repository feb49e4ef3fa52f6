"""Rules about LoRA: each reports what its adapters do not go with, and suggests what is valid."""

from __future__ import annotations

from tests.support.rule_cases import LORA_RULES, Case, check_case, check_rules_have_cases, every, reported

LORA = "--lora-rank 4 --attention-dropout 0 --hidden-dropout 0"
CASES: list[Case] = [
    (f"{LORA} --num-experts 4 --disable-bias-linear", 1, {"--lora-rank", "--num-experts"}, ["dense layers"], []),
    (
        f"{LORA} --multi-latent-attention --position-embedding-type rope --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4",
        1,
        {"--lora-rank", "--multi-latent-attention"},
        ["exclude each other"],
        [],
    ),
    (f"{LORA} --mtp-num-layers 1", 1, {"--lora-rank", "--mtp-num-layers"}, ["exclude each other"], []),
    (f"{LORA} --bf16 --fp8-format hybrid", 1, {"--lora-rank", "--fp8-format"}, ["FP8 are not supported"], []),
    (f"{LORA} --mup-base-width 48", 1, {"--lora-rank", "--mup-base-width"}, ["width"], []),
    (f"{LORA} --qk-clip", 1, {"--lora-rank", "--qk-clip"}, ["Only adapters are updated"], []),
    (f"{LORA} --decoupled-lr 0.01", 1, {"--lora-rank", "--decoupled-lr"}, ["Only adapters are updated"], []),
    (
        f"{LORA} --data-parallel-sharding-strategy optim_grads_params",
        2,
        {"--lora-rank", "--data-parallel-sharding-strategy"},
        ["every data rank holds them in full"],
        ["--data-parallel-sharding-strategy optim_grads"],
    ),
    (f"{LORA} --optimizer muon", 1, {"--lora-rank", "--optimizer"}, ["muon"], ["--optimizer adam"]),
    (f"{LORA} --param-groups 'layers.*.lora_b.weight optimizer=muon'", 1, {"--lora-rank", "--param-groups"}, ["muon"], []),
    (f"{LORA} --lora-targets mlp.up mlp.up", 1, {"--lora-targets"}, ["twice"], ["--lora-targets mlp.up"]),
]


def test_what_adapters_do_not_go_with_is_reported() -> None:
    every(CASES, check_case)


def test_each_rule_has_a_case() -> None:
    check_rules_have_cases(LORA_RULES, CASES)


def test_groups_of_frozen_parameters_are_told() -> None:
    (found,) = reported(f"{LORA} --param-groups 'layers.*.attention.qkv.weight lr_mult=0.1'")
    assert "is not trained" in found.message and "lora_a" in str(found)
    assert not reported(f"{LORA} --param-groups 'layers.*.lora_b.weight lr_mult=16'"), "LoRA+"
