#!/usr/bin/env bash
# Qwen3 30B-A3B (Qwen team 2025), a mixture of experts, on one node of 8 GPUs of 80 GB: expert 8 x data 8. Each GPU has 16 of the
# 128 experts of each layer. The optimizer state of all other parameters is sharded over the GPUs. Half of the optimizer state is in
# host memory.
#
#   DATA=data/corpus_text_document bash examples/train_8gpu_qwen3_30b_a3b.sh [flags that are added to those below, or override them]
#
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it
#   TOKENIZER    folder with vocab.json and merges.txt of the tokenizer
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1), if every expert gets the same number of tokens:
#   memory per GPU       59.3 GB
#   tokens per step      4,194,304
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"

model=(--model "${MODEL:-qwen3-30b-a3b}")
layout=(--device cuda --bf16 --expert-model-parallel-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --optimizer-cpu-offload --optimizer-offload-fraction 0.5)
# The balance loss covers the microbatches of a rank; its coefficient is that of Qwen (section 2).
experts=(--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32)
# 2 trillion tokens, 4 million per step.
batch=(--micro-batch-size 2 --global-batch-size 1024 --train-iters 476837 "${experts[@]}")
optimizer=(--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-8)
data=(--data-path "$DATA" --tokenizer-type GPT2BPETokenizer
    --vocab-file "${TOKENIZER:-tokenizer}/vocab.json" --merge-file "${TOKENIZER:-tokenizer}/merges.txt")

launch 1 8 qwen3-30b-a3b "$@"
