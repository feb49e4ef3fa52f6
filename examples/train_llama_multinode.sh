#!/usr/bin/env bash
# A model of the shape of Llama 2 70B on several nodes of 8 GPUs: tensor 8 x pipeline 4 (each with 2 virtual stages), the rest data,
# over which the optimizer's state is sharded.
#
# Run it once on every node; HEAD is the same everywhere, the name or address of one of them:
#
#   HEAD=node0 NNODES=8 DATA=... bash examples/train_llama_multinode.sh [flags that are added, or that count instead of those here]
#
# Under Slurm (one task a node) NNODES and the job's number are known:
#
#   HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) srun --ntasks-per-node 1 bash examples/train_llama_multinode.sh
#
#   DATA          prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes see
#   TOKENIZER     its sentencepiece model (tokenizer.model)
#   RUN           folder of checkpoints and curves, on a file system that all nodes see (runs/llama-70b)
#
# Start it again after a stop, with another number of nodes if need be: it goes on from the newest checkpoint in RUN.
set -euo pipefail

head=${HEAD:?HEAD is not set: give the name or address of one node, the same on all nodes}
data=${DATA:?DATA is not set: give the prefix of a dataset, as tools/preprocess_data.py writes it}
nodes=${NNODES:-${SLURM_NNODES:?NNODES is not set: give the number of nodes}}
tokenizer=${TOKENIZER:-tokenizer.model} run=${RUN:-runs/llama-70b}
program=$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py

layout=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
model=(--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --seq-length 4096 --position-embedding-type rope --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0)
training=(--micro-batch-size 1 --global-batch-size 1024 --train-iters 100000)
optimizer=(--lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0)
tokens=(--data-path "$data" --tokenizer-type Llama2Tokenizer --tokenizer-model "$tokenizer")
keeping=(--save "$run/checkpoints" --load "$run/checkpoints" --save-interval 500 --keep-last 3 --async-save)
telling=(--log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10
    --tensorboard-dir "$run/tensorboard" --metrics-file "$run/metrics.jsonl")

exec torchrun --nnodes "$nodes" --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "${SLURM_JOB_ID:-train}" \
    "$program" "${layout[@]}" "${model[@]}" "${training[@]}" "${optimizer[@]}" "${tokens[@]}" "${keeping[@]}" "${telling[@]}" "$@"
