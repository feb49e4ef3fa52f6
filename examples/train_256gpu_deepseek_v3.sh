#!/usr/bin/env bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@900 --requeue --open-mode=append
# DeepSeek-V3 671B (37B active; DeepSeek-AI 2024), a mixture of experts, on 32 nodes of 8 GPUs of 80 GB: pipeline 16 x data 16. The
# 16 data-parallel ranks of a stage form two groups of expert size 8, so tokens are exchanged only within a node. Three quarters of
# the optimizer state are in host memory (276 GB per node); a step takes minutes, and updates that state once. The layer for
# multi-token prediction makes the last stage longer than the others. Without it (--mtp-num-layers 0
# --pipeline-model-parallel-layout 'Etttt|ttt|(tttt|)*13ttL'), 4.1 % of the time is idle instead.
#
# Start it with sbatch from the repository (add --partition and --account if your cluster needs them), or on each of the 32 nodes:
#
#   DATA=/shared/corpus_text_document sbatch examples/train_256gpu_deepseek_v3.sh
#   HEAD=node0 DATA=/shared/corpus_text_document bash examples/train_256gpu_deepseek_v3.sh
#
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access
#   TOKENIZER    tokenizer.json of the model
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   Flags after the script's name are added to the flags below, or override them. More variables: examples/launch.sh.
#
# Result of the dry run (DRY_RUN=1), if every expert gets the same number of tokens:
#   memory per GPU       58.5 GB
#   tokens per step      62,914,560
#   pipeline idle        17.4 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy of this script in another folder
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes can access"

model=(--model "${MODEL:-deepseek-v3}" --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3)
# The last stage has the layer for multi-token prediction and two losses, together as much work as five layers. The first stage has
# the three dense layers.
layout=(--device cuda --bf16 --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Ettttt|(tttt|)*14mL'
    --expert-model-parallel-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --optimizer-cpu-offload --optimizer-offload-fraction 0.75)
# Experts are balanced by router biases, and by a small loss within each sequence (section 4.2).
experts=(--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32)
# 14.3 trillion tokens; 63 million per step after the first 469 billion; the learning rate falls over the last 4.3 trillion
# (section 4.2).
batch=(--micro-batch-size 1 --global-batch-size 15360 --rampup-batch-size 3072 3072 114501953 --train-samples 3491210937
    "${experts[@]}" --manual-gc --manual-gc-interval 100)
optimizer=(--lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-wsd-decay-samples 1049804687
    --lr-warmup-samples 6144000 --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-tokenizer.json}")

launch 32 8 deepseek-v3 "$@"
