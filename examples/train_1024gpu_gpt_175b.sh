#!/usr/bin/env bash
#SBATCH --nodes=128 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append
# GPT-3 175B (Brown et al. 2020, table 2.1) on 128 nodes of 8 GPUs of 80 GB: tensor 8 x pipeline 8 (each with 3 virtual stages) x
# data 16.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 128 nodes:
#
#   DATA=/shared/corpus_text_document sbatch examples/train_1024gpu_gpt_175b.sh
#   HEAD=node0 DATA=/shared/corpus_text_document bash examples/train_1024gpu_gpt_175b.sh
#
#   DATA             prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   VOCAB, MERGES    files of the GPT-2 tokenizer (vocab.json, merges.txt)
#   MODEL            another model of that size (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them. More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       33.6 GB
#   tokens per step      3,145,728
#   pipeline idle        4.6 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"

model=(--model "${MODEL:-gpt3-175b}")
layout=(--device cuda --bf16 --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 3
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
# 300 billion tokens; warm-up over 375 million, decay over 260 billion (appendix B).
batch=(--micro-batch-size 1 --global-batch-size 1536 --train-samples 146484375 --manual-gc --manual-gc-interval 100)
optimizer=(--lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA"
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:-vocab.json}" --merge-file "${MERGES:-merges.txt}")

launch 128 8 gpt-175b "$@"
