#!/usr/bin/env bash
# A GPT of 6.7 billion parameters on one node of 8 GPUs: tensor 2 x pipeline 2 x data 2.
#
#   DATA=data/corpus_text_document bash examples/train_gpt_1node_8gpu.sh [flags that are added, or that count instead of those here]
#
#   DATA          prefix of the dataset, as tools/preprocess_data.py writes it
#   VOCAB, MERGES files of the GPT-2 tokenizer (vocab.json, merges.txt)
#   RUN           folder of checkpoints and curves (runs/gpt-6.7b)
#
# Start it again after a stop: it goes on from the newest checkpoint in RUN.
set -euo pipefail

data=${DATA:?DATA is not set: give the prefix of a dataset, as tools/preprocess_data.py writes it}
vocab=${VOCAB:-vocab.json} merges=${MERGES:-merges.txt} run=${RUN:-runs/gpt-6.7b}
program=$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py

layout=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce --bf16)
model=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --attention-dropout 0 --hidden-dropout 0)
training=(--micro-batch-size 1 --global-batch-size 512 --train-iters 100000)
optimizer=(--lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0)
tokens=(--data-path "$data" --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges")
keeping=(--save "$run/checkpoints" --load "$run/checkpoints" --save-interval 1000 --keep-last 3 --async-save)
telling=(--log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10
    --tensorboard-dir "$run/tensorboard" --metrics-file "$run/metrics.jsonl")

exec torchrun --standalone --nproc-per-node 8 "$program" "${layout[@]}" "${model[@]}" "${training[@]}" "${optimizer[@]}" \
    "${tokens[@]}" "${keeping[@]}" "${telling[@]}" "$@"
