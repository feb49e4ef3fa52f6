#!/usr/bin/env bash
# A small GPT on the CPU of a laptop, 2 processes: the same program, flags and restarts as on a cluster, in about a minute.
#
#   bash examples/train_cpu_laptop.sh [flags that are added to those below, or override them]
#
#   DATA, TOKENIZER    prefix of a dataset (tools/preprocess_data.py) and its sentencepiece model; without them, synthetic tokens.
#                      examples/quickstart.sh leaves quickstart-data/stdlib_text_document and quickstart-data/vocabulary.model.
#   More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per process   50.8 MB
#   tokens per step      4,096
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/launch.sh"

model=(--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --attention-dropout 0 --hidden-dropout 0)
layout=(--device cpu --use-distributed-optimizer)
batch=(--micro-batch-size 8 --global-batch-size 32 --train-iters 200)
logging=(--log-interval 10 --eval-interval 100 --eval-iters 4 --save-interval 50)
optimizer=(--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.95)
data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1000)
if [[ -n ${DATA-} ]]; then
    need TOKENIZER "the sentencepiece model of DATA (quickstart-data/vocabulary.model)"
    data=(--data-path "$DATA" --split 95,5,0 --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER")
fi

launch 1 2 laptop "$@"
