#!/bin/bash
# Llama 2 by Megatron-DeepSpeed, which writes its configuration itself. Settings as in a public example of it.
set -ex
BASE_PATH=./tmp
DS_CONFIG=${BASE_PATH}/deepspeed.json
DATASET="1 ./tmp/data/bookcorpus_train_text_sentence"
TOKENIZER_PATH=./tmp/tokenizer.model
TP=2
PP=2
ZERO_STAGE=0
GPUS_PER_NODE=8
NNODES=1
NUM_HEADS=16
SEQ_LENGTH=2048
GLOBAL_BATCH_SIZE=32 # in sequences
activation_checkpoint="true"
LOG_TO_WANDB=0
WANDB_ARGS=
if [ $LOG_TO_WANDB -eq 1 ]
then
WANDB_ARGS="\
       --wandb-project pretrain-llama2"
fi
cat <<EOT > $DS_CONFIG
{
  "train_batch_size" : $GLOBAL_BATCH_SIZE,
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 1,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
  "bf16": {
    "enabled": true
  }
}
EOT
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
  # ds_args="--checkpoint-activations ${ds_args}"
  ds_args="--recompute-granularity full --recompute-method uniform ${ds_args}"
fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
torchrun $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TP \
       --pipeline-model-parallel-size $PP \
       --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 \
       --num-attention-heads $NUM_HEADS \
       --micro-batch-size 4 \
       --global-batch-size $GLOBAL_BATCH_SIZE \
       --seq-length $SEQ_LENGTH \
       --max-position-embeddings $SEQ_LENGTH \
       --train-iters 250000 \
       --data-path $DATASET \
       --data-impl mmap \
       --tokenizer-type GPTSentencePieceTokenizer \
       --tokenizer-model $TOKENIZER_PATH \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 \
       --weight-decay 0.1 \
       --lr-warmup-iters 2000 \
       --optimizer adam \
       --adam-beta2 0.95 \
       --eval-iters 10 \
       --bf16 \
       --no-query-key-layer-scaling \
       --attention-dropout 0 \
       --hidden-dropout 0 \
       --use-rotary-position-embeddings \
       --untie-embeddings-and-output-weights \
       --swiglu \
       --normalization rmsnorm \
       --disable-bias-linear \
       --num-key-value-heads 4 \
       $WANDB_ARGS \
       $ds_args
