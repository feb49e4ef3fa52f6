#!/usr/bin/env bash
#SBATCH --nodes=384 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@600 --requeue --open-mode=append
# The model with 1 trillion parameters of Narayanan et al. 2021, table 1, on 384 nodes of 8 GPUs of 80 GB: tensor 8 x pipeline 64
# (each with 2 virtual stages) x data 6.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 384 nodes:
#
#   DATA=/shared/corpus_text_document sbatch examples/train_3072gpu_gpt_1t.sh
#   HEAD=node0 DATA=/shared/corpus_text_document bash examples/train_3072gpu_gpt_1t.sh
#
#   DATA             prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   VOCAB, MERGES    files of the GPT-2 tokenizer (vocab.json, merges.txt)
#   MODEL            another model of that size (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them. More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1):
#   memory per GPU       59.7 GB
#   tokens per step      6,291,456
#   pipeline idle        12.5 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"

model=(--model "${MODEL:-gpt-1t}")
layout=(--device cuda --bf16 --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 64 --num-virtual-stages-per-pipeline-rank 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
# 450 billion tokens, as in the paper. The paper gives no learning rate; this is the learning rate of GPT-3 175B.
batch=(--micro-batch-size 1 --global-batch-size 3072 --train-samples 219726563 --manual-gc --manual-gc-interval 100)
optimizer=(--lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-samples 183105
    --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA"
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:-vocab.json}" --merge-file "${MERGES:-merges.txt}")

launch 384 8 gpt-1t "$@"
