#!/bin/bash
# A small mixture of experts. Settings as in a public example of Megatron-LM.
GPUS_PER_NODE=2
NNODES=${SLURM_NNODES:-"1"}
TOKENIZER_MODEL=/workspace/tokenizer.model

MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 256
    --max-position-embeddings 2048
    --num-layers 2
    --hidden-size 256
    --ffn-hidden-size 896
    --num-attention-heads 2
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 2
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)
MOE_ARGS=(
    --num-experts 2
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
#    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model ${TOKENIZER_MODEL}
    --mock-data
    #--data-path $DATA_PATH
    --split 99990,8,2
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --lr 1e-4
    --train-iters 7
    # --lr-decay-style cosine
    --min-lr 1.0e-5
    --weight-decay 0.1
    --clip-grad 1.0
)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 1 --expert-model-parallel-size 2 --use-distributed-optimizer)
LOGGING_ARGS=(
  #  --log-interval 1 \
   # --save-interval 10000 \
    --eval-iters 10 \
    #--save $CHECKPOINT_PATH \
    --no-load-optim \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"} --wandb-exp-name ${WANDB_NAME:-"Mixtral_8x7B"})
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${DATA_ARGS[@]} ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} ${LOGGING_ARGS[@]}
