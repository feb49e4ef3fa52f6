#!/bin/bash
# A line of Megatron-DeepSpeed in tokens. Settings as in a public example of it.
seq_len=2048
global_batch_size=512
train_tokens_in_billion=300
train_tokens=$((${train_tokens_in_billion} * 1000000000))
train_samples=$(( 300 * 1000000000 * 2 / ${seq_len} ))
lr_warmup_tokens=$((3000 * 1000000))
lr_decay_tokens=$((${train_tokens_in_billion} * 1000000000))
num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)-2))
current_time=$(date "+%Y.%m.%d_%H.%M.%S")
data_options=" \
    --vocab-file gpt2-vocab.json \
    --merge-file gpt2-merges.txt \
    --tokenizer-type GPT2BPETokenizer \
    --data-path data/pile_text_document \
    --data-impl mmap"
megatron_options=" \
    --override-opt_param-scheduler \
    --adam-beta2 0.95 \
    --tensor-model-parallel-size 2 \
    --init-method-std 0.013 \
    --lr-decay-tokens ${lr_decay_tokens} \
    --lr-warmup-tokens ${lr_warmup_tokens} \
    --micro-batch-size 2 \
    --global-batch-size ${global_batch_size} \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length ${seq_len} \
    --max-position-embeddings ${seq_len} \
    --train-tokens ${train_tokens} \
    --train-samples ${train_samples} \
    --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine \
    --split 949,50,1 \
    --weight-decay 0.1 \
    --hysteresis 2 \
    --fp16 \
    --load checkpoints/gpt_13b \
    --save checkpoints/gpt_13b \
    --save-interval 100 \
    --tensorboard-dir tensorboard/${current_time} \
    --log-optimizer-states-to-tensorboard \
    --checkpoint-activations"
deepspeed_options=" \
    --deepspeed \
    --deepspeed_config ds_config.json \
    --zero-stage 1 \
    --pipeline-model-parallel-size 2 \
    --deepspeed-activation-checkpointing"
for i in 1 2; do
    restarts=$i
done
deepspeed ../../pretrain_gpt.py ${megatron_options} ${data_options} ${deepspeed_options} &>> log.txt
