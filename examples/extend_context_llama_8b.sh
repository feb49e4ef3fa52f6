#!/usr/bin/env bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append
# Llama 3 8B from 8,192 to 131,072 tokens by YaRN (Peng et al. 2023) on 4 nodes of 8 GPUs of 80 GB: tensor 4 x context 8.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 4 nodes:
#
#   FROM=/shared/llama3_8b DATA=/shared/long_text_document sbatch examples/extend_context_llama_8b.sh
#
#   FROM         checkpoint of the model with its short context, as tools/checkpoint.py import writes it
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   TOKENIZER    tokenizer.json of the model, or the folder that contains it
#   MODEL        another model of that size and context (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them, for example --rotary-scaling-factor 4
#   --seq-length 32768.
#   More variables: examples/launch.sh.
#
# Attention stays within documents, so context-parallel ranks split a sequence by the attention work of its documents
# (docs/parallelism.md).
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       29.9 GB
#   tokens per step      8,388,608
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"
need FROM "a checkpoint of the model with its short context, as tools/checkpoint.py import writes it"

model=(--model "${MODEL:-llama3-8b}" --seq-length 131072 --pretrained-checkpoint "$FROM"
    --rope-type yarn --rotary-scaling-factor 16 --original-max-position-embeddings 8192)
layout=(--device cuda --bf16 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations --recompute-modules layernorm mlp_act)
# 400 steps of 64 samples at this learning rate (Peng et al. 2023, section 4.1).
batch=(--micro-batch-size 1 --global-batch-size 64 --train-iters 400)
optimizer=(--lr 2e-5 --lr-decay-style constant --lr-warmup-iters 20 --weight-decay 0 --adam-beta2 0.95)
data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-tokenizer.json}"
    --reset-attention-mask --reset-position-ids)

launch 4 8 extend-llama-8b "$@"
