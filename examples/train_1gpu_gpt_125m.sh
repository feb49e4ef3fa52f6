#!/usr/bin/env bash
# GPT-3 Small, 125M parameters (Brown et al. 2020, table 2.1), on one GPU.
#
#   DATA=data/corpus_text_document bash examples/train_1gpu_gpt_125m.sh [flags that are added to those below, or override them]
#
#   DATA             prefix of the dataset, as tools/preprocess_data.py writes it
#   VOCAB, MERGES    files of the GPT-2 tokenizer (vocab.json, merges.txt)
#   MODEL            another model of that size (python pretrain_gpt.py --model list)
#   More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       13.5 GB
#   tokens per step      524,288
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it"

model=(--model "${MODEL:-gpt3-125m}")
layout=(--device cuda --bf16)
# 300 billion tokens; warm-up over 375 million, decay over 260 billion (appendix B).
batch=(--micro-batch-size 16 --global-batch-size 256 --train-samples 146484375)
optimizer=(--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA"
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:-vocab.json}" --merge-file "${MERGES:-merges.txt}")

launch 1 1 gpt-125m "$@"
