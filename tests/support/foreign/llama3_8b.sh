#!/bin/bash
# Llama 3 8B in 8 bits. Settings as in a public example of Megatron-LM.
CHECKPOINT_PATH=${1:-"checkpoints/llama3_8b"}
LOGS=${2:-"tensorboard/llama3_8b"}
TOKENIZER_ARG=${3:-"MOCK"}
DATA_ARG=${4:-"MOCK"}
mkdir -p "$(dirname "$CHECKPOINT_PATH")"
GPUS_PER_NODE=8
NUM_NODES=1
NODE_RANK=${NODE_RANK:-0}
DTYPE="fp8"
PRETRAIN_SCRIPT_PATH="examples/classes/pretrain_gpt.py"
DATA_CACHE_PATH="${PWD}/cache"

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank $NODE_RANK)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000 
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear 
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of the ends
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta2 0.95
    --bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss 
    --manual-gc 
    --exit-duration-in-mins 235 
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    # --pipeline-model-parallel-size 4
    --sequence-parallel
)
TRAINING_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)

if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256" 
        "--data-cache-path ${DATA_CACHE_PATH}"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        "--num-workers 1"
    )
else
    DATA_ARGS=("--data-path $DATA_ARG" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER_ARG")
fi
EVAL_ARGS=(
    --log-interval 1
    --eval-iters 32
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH" 
    --tensorboard-dir "$LOGS"
)
if [ ! -f "$PRETRAIN_SCRIPT_PATH" ]; then
    echo "pretrain_gpt.py not found"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} "$PRETRAIN_SCRIPT_PATH" ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} ${DATA_ARGS[@]} ${EVAL_ARGS[@]}
