#!/usr/bin/env bash
# GPT-3 XL, 1.3B parameters (Brown et al. 2020, table 2.1; with 16 heads of 128 channels, which fit the hidden size), on one GPU.
#
#   DATA=data/corpus_text_document bash examples/train_1gpu_gpt_1_3b.sh [flags that are added to those below, or override them]
#
#   DATA             prefix of the dataset, as tools/preprocess_data.py writes it
#   VOCAB, MERGES    files of the GPT-2 tokenizer (vocab.json, merges.txt)
#   MODEL            another model of that size (python pretrain_gpt.py --model list)
#   More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       50.7 GB
#   tokens per step      1,048,576
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"

model=(--model "${MODEL:-gpt3-1.3b}")
layout=(--device cuda --bf16)
# 300 billion tokens; warm-up over 375 million, decay over 260 billion (appendix B).
batch=(--micro-batch-size 8 --global-batch-size 512 --train-samples 146484375)
optimizer=(--lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA"
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:-vocab.json}" --merge-file "${MERGES:-merges.txt}")

launch 1 1 gpt-1.3b "$@"
