#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append
# Llama 3 70B (Grattafiori et al. 2024) at 131,072 tokens on 16 nodes of 8 GPUs of 80 GB: tensor 8 x context 8 x pipeline 2.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 16 nodes:
#
#   FROM=/shared/llama3_70b DATA=/shared/long_text_document sbatch examples/train_16nodes_long_llama_70b.sh
#
#   FROM         checkpoint of the model with its short context, as tools/checkpoint.py import writes it
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   TOKENIZER    tokenizer.json of the model, or the folder that contains it
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them. More variables: examples/launch.sh.
#
# Attention stays within documents, so context-parallel ranks split a sequence by the attention work of its documents
# (docs/parallelism.md).
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       65.7 GB
#   tokens per step      4,194,304
#   pipeline idle        3.8 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"
need FROM "a checkpoint of the model with its short context, as tools/checkpoint.py import writes it"

model=(--model "${MODEL:-llama3-70b}" --seq-length 131072 --pretrained-checkpoint "$FROM")
layout=(--device cuda --bf16 --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 8
    --pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations --recompute-modules layernorm mlp_act)
# 4 million tokens per step.
batch=(--micro-batch-size 1 --global-batch-size 32 --train-iters 24000 --manual-gc --manual-gc-interval 100)
optimizer=(--lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-5)
data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-tokenizer.json}"
    --reset-attention-mask --reset-position-ids)

launch 16 8 long-llama-70b "$@"
