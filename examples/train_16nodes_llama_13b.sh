#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append
# Llama 2 13B (Touvron et al. 2023) on 16 nodes of 8 GPUs of 80 GB: tensor 2 x data 64.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 16 nodes:
#
#   DATA=/shared/corpus_text_document sbatch examples/train_16nodes_llama_13b.sh
#   HEAD=node0 DATA=/shared/corpus_text_document bash examples/train_16nodes_llama_13b.sh
#
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   TOKENIZER    sentencepiece model of the tokenizer (tokenizer.model)
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them. More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       55.6 GB
#   tokens per step      4,194,304
#   pipeline idle        0.0 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"

model=(--model "${MODEL:-llama2-13b}")
layout=(--device cuda --bf16 --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
# 2 trillion tokens, 4 million per step (section 2.2).
batch=(--micro-batch-size 1 --global-batch-size 1024 --train-iters 476837 --manual-gc --manual-gc-interval 100)
optimizer=(--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-5)
data=(--data-path "$DATA" --tokenizer-type Llama2Tokenizer --tokenizer-model "${TOKENIZER:-tokenizer.model}")

launch 16 8 llama-13b "$@"
