#!/usr/bin/env bash
# Llama 2 7B (Touvron et al. 2023) on one node of 8 GPUs of 80 GB: tensor 2 x data 4, with a sharded optimizer state.
#
#   DATA=data/corpus_text_document bash examples/train_8gpu_llama_7b.sh [flags that are added to those below, or override them]
#
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it
#   TOKENIZER    sentencepiece model of the tokenizer (tokenizer.model)
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       49.8 GB
#   tokens per step      4,194,304
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"

model=(--model "${MODEL:-llama2-7b}")
layout=(--device cuda --bf16 --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
# 2 trillion tokens, 4 million per step (section 2.2).
batch=(--micro-batch-size 2 --global-batch-size 1024 --train-iters 476837)
optimizer=(--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-5)
data=(--data-path "$DATA" --tokenizer-type Llama2Tokenizer --tokenizer-model "${TOKENIZER:-tokenizer.model}")

launch 1 8 llama-7b "$@"
