#!/usr/bin/env bash
#SBATCH --nodes=32 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=24:00:00 --signal=B:USR1@900 --requeue --open-mode=append
# DeepSeek-V3 671B (37B active; DeepSeek-AI 2024), a mixture of experts, on 32 nodes of 8 GPUs of 80 GB: pipeline 16 x data 16, in
# which expert 8 x 2 copies. Tokens travel to their experts inside a node. Three quarters of the optimizer's state are in host
# memory (276 GB of a node); their update comes once in a step of minutes. With the depth of multi-token prediction stages cannot be
# equal; without, by --mtp-num-layers 0 --pipeline-model-parallel-layout 'Etttt|ttt|(tttt|)*13ttL', 4.1 % of the time is idle.
#
# Under Slurm, from the repository (with --partition and --account as your cluster wants them), or once on each of the 32 nodes:
#
#   DATA=/shared/corpus_text_document sbatch examples/train_256gpu_deepseek_v3.sh
#   HEAD=node0 DATA=/shared/corpus_text_document bash examples/train_256gpu_deepseek_v3.sh
#
#   DATA         prefix of the dataset, as tools/preprocess_data.py writes it, on a file system that all nodes see
#   TOKENIZER    its tokenizer.json
#   MODEL        another model of that size (python pretrain_gpt.py --model list)
#   Flags behind the name are added, or count instead of those here. More variables: examples/launch.sh.
#
# By the dry run (DRY_RUN=1), with as many tokens for each expert:
#   memory per GPU       58.5 GB
#   tokens per step      62,914,560
#   pipeline idle        17.4 %
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/launch.sh ]] || here=$SLURM_SUBMIT_DIR/examples # sbatch runs a copy that lies elsewhere
source "$here/launch.sh"
need DATA "the prefix of a dataset, as tools/preprocess_data.py writes it, on a file system that all nodes see"

model=(--model "${MODEL:-deepseek-v3}" --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3)
# The last stage has the depth and two losses, which are as much work as five layers; the first has the three dense layers.
layout=(--device cuda --bf16 --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Ettttt|(tttt|)*14mL'
    --expert-model-parallel-size 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --optimizer-cpu-offload --optimizer-offload-fraction 0.75)
# Balanced by biases, and a little within each sequence (section 4.2).
experts=(--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32)
# 14.3 trillion tokens, 63 million in a step after the first 469 billion; the rate falls over the last 4.3 trillion (section 4.2).
batch=(--micro-batch-size 1 --global-batch-size 15360 --rampup-batch-size 3072 3072 114501953 --train-samples 3491210937
    "${experts[@]}" --manual-gc --manual-gc-interval 100)
optimizer=(--lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-wsd-decay-samples 1049804687
    --lr-warmup-samples 6144000 --weight-decay 0.1 --adam-beta2 0.95)
data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-tokenizer.json}")

launch 32 8 deepseek-v3 "$@"
