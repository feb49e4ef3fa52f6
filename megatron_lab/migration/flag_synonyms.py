"""Flags under the names of other frameworks: the Hugging Face Trainer, nanoGPT, torchtitan, DeepSpeed, LitGPT, Lightning and
others.

They are not accepted, because their values can have another meaning, such as a batch size per device. An error about such a flag
names the flags of this project that take its place.
"""

from __future__ import annotations

import re
from functools import cache

from megatron.config.flags import find_flag

_TABLE = """
learning-rate max-lr peak-lr base-lr lr-max initial-lr peak-learning-rate max-learning-rate optimizer-lr: Use --lr.
lr-min min-learning-rate final-lr end-lr min-lr-factor min-lr-ratio lr-final alpha-f: Use --min-lr, a learning rate.
warmup-steps warmup-iters num-warmup-steps lr-warmup-steps warmup-iterations: Use --lr-warmup-iters.
warmup-ratio warmup-frac warmup-fraction warmup-percent: Use --lr-warmup-fraction.
warmup-tokens warmup-samples: Use --lr-warmup-samples, a number of sequences.
lr-scheduler-type lr-scheduler scheduler lr-schedule scheduler-type lr-decay-type decay-type decay-lr: Use --lr-decay-style cosine,
    linear, constant, inverse-square-root or WSD.
decay-steps decay-iters lr-decay-steps decay-ratio: Use --lr-decay-iters, and for WSD --lr-wsd-decay-iters.
epochs num-epochs num-train-epochs max-epochs n-epochs max-num-epochs: Use --train-epochs, or set the number of steps
    (--train-iters) or of sequences (--train-samples).
early-stopping early-stop early-stopping-rounds early-stopping-steps patience: Use --early-stopping-patience, a number of
    evaluations without a new lowest validation loss.
load-best-model-at-end save-best save-best-only keep-best-checkpoint metric-for-best-model: Use --keep-best, which keeps
    the checkpoint with the lowest validation loss.
early-stopping-threshold min-delta: Use --early-stopping-min-delta.
max-steps max-iters steps num-steps total-steps max-train-steps train-steps num-train-steps num-iterations iterations iters
    training-steps num-iters n-steps max-iterations: Use --train-iters.
max-tokens num-tokens total-tokens max-duration token-budget training-tokens: Use --train-samples, the number of sequences: tokens
    / --seq-length.
batch-size-per-device batch-size-per-gpu per-device-train-batch-size per-gpu-train-batch-size train-micro-batch-size-per-gpu
    device-batch-size device-train-microbatch-size micro-batch microbatch-size local-batch-size mbs: Use --micro-batch-size, the
    sequences of one forward pass on a data rank; --global-batch-size is that of a step.
train-batch-size total-batch-size global-train-batch-size effective-batch-size gbs tokens-per-batch total-batch-tokens: Use
    --global-batch-size, the sequences of a step on all devices, and --micro-batch-size, those of one forward pass.
per-device-eval-batch-size eval-batch-size per-gpu-eval-batch-size device-eval-batch-size val-batch-size: An evaluation has the
    batch sizes of the training: --micro-batch-size and --global-batch-size.
gradient-accumulation-steps grad-accum grad-accum-steps gradient-accumulation accumulation-steps accumulate-grad-batches
    gradient-accumulation-iters grad-accumulation-steps num-microbatches: It follows from the batch sizes. Use --global-batch-size,
    which is --micro-batch-size x data ranks x accumulation steps.
n-layer n-layers num-hidden-layers layers depth num-blocks n-blocks: Use --num-layers.
n-embd n-embed d-model hidden-dim embed-dim embedding-dim dim model-dim hidden width n-hidden emb-dim: Use --hidden-size.
n-head n-heads num-heads heads attention-heads num-attn-heads: Use --num-attention-heads.
n-kv-heads num-kv-heads num-key-value-heads kv-heads n-query-groups n-kv-head: Use --group-query-attention and --num-query-groups.
head-dim d-head d-kv head-size: Use --kv-channels.
intermediate-size ffn-dim d-ff ffn-size mlp-hidden-size ffn-hidden-dim mlp-dim hidden-mlp-dim inner-dim n-inner: Use
    --ffn-hidden-size.
block-size context-length context-size max-seq-length max-seq-len seq-len sequence-length ctx-len n-ctx n-positions max-length
    max-len context-window context seqlen max-sequence-length: Use --seq-length.
rope-theta rope-base theta: Use --rotary-base.
rope-scaling: Use --use-rope-scaling (Llama 3.1) or --rope-type.
rope rotary use-rope pos-emb position-embedding: Use --position-embedding-type rope.
rms-norm rmsnorm norm-type norm layer-norm-type: Use --normalization RMSNorm or LayerNorm.
rms-norm-eps layer-norm-eps layernorm-eps norm-eps layer-norm-epsilon: Use --norm-epsilon.
tie-word-embeddings tie-embeddings weight-tying tie-weights: Embeddings are tied unless --untie-embeddings-and-output-weights is
    set.
hidden-act activation-function act activation-type: Use --swiglu, --geglu, --relu, --squared-relu or --gelu-exact.
bias use-bias include-bias: Biases are on; --disable-bias-linear switches them off.
dropout resid-pdrop attn-pdrop dropout-rate residual-dropout embd-pdrop hidden-dropout-prob: Use --attention-dropout and
    --hidden-dropout.
init-std initializer-range: Use --init-method-std.
n-experts num-local-experts experts n-routed-experts moe-experts: Use --num-experts.
top-k num-experts-per-tok experts-per-token moe-top-k: Use --moe-router-topk.
preset arch architecture model-type model-size size flavor model-flavor config-name model-config: Use --model NAME for the shape of
    a known model (--model list), or --recipe NAME for its published training settings too (--recipe list).
model-name model-name-or-path pretrained-model-name-or-path model-path hf-model base-model from-pretrained init-from
    checkpoint-path model-id: For the shape of a known model, use --model NAME (--model list). For its weights, convert them by
    tools/checkpoint.py import, and use --pretrained-checkpoint.
hyperparameters hparams training-recipe: Use --recipe NAME (--recipe list) or --config FILE.
config-file cfg conf config-path settings yaml toml job-config: Use --config FILE, in YAML or TOML.
output-dir out-dir save-dir save-path checkpoint-dir ckpt-dir checkpoint-folder default-root-dir dump-folder results-dir ckpt-path
    checkpoints save-folder checkpoint-path-save save-to: Use --save FOLDER, and --load FOLDER to resume from it.
resume-from-checkpoint resume-from resume auto-resume load-path load-checkpoint restore-from load-dir continue-from resume-path
    load-from: Use --load FOLDER; with the folder of --save, a run resumes from its newest checkpoint.
save-steps save-every save-freq checkpoint-interval checkpoint-every ckpt-interval save-iters save-every-n-steps checkpoint-freq
    ckpt-every save-strategy checkpointing-steps: Use --save-interval, in steps.
save-total-limit keep-latest-k save-top-k max-checkpoints keep-checkpoints num-checkpoints-to-keep keep: Use --keep-last.
eval-steps eval-every eval-freq val-interval val-check-interval eval-strategy evaluation-strategy validation-interval val-freq
    val-loss-every test-interval eval-every-n-steps: Use --eval-interval, in steps.
val-iters num-eval-batches limit-val-batches eval-batches max-eval-samples val-steps eval-max-steps: Use --eval-iters, in global
    batches.
logging-steps log-every log-freq log-every-n-steps print-every print-freq logging-interval log-steps report-interval log-iters
    logging-strategy: Use --log-interval, in steps.
logging-dir tb-dir tensorboard tensorboard-log-dir tb-log-dir use-tensorboard: Use --tensorboard-dir FOLDER.
report-to wandb wandb-log use-wandb wandb-run-name run-name project wandb-group enable-wandb experiment-name run-id: Use
    --wandb-project and --wandb-exp-name, --mlflow-experiment, --trackio-project, or --tensorboard-dir.
mlflow use-mlflow mlflow-uri tracking-uri: Use --mlflow-experiment and --mlflow-tracking-uri.
entity: Use --wandb-entity.
gradient-checkpointing activation-checkpointing use-gradient-checkpointing grad-checkpointing recompute ac-mode
    activation-checkpoint activation-checkpoint-mode gradient-checkpoint remat: Use --recompute-granularity selective or full.
tp tp-size tp-degree tensor-parallel tensor-parallel-size tensor-parallel-degree mp mp-size model-parallel model-parallel-degree:
    Use --tensor-model-parallel-size.
pp pp-size pp-degree pipeline-parallel pipeline-parallel-size pipeline-parallel-degree pipe-parallel-size pipeline-stages
    num-stages: Use --pipeline-model-parallel-size.
cp cp-size context-parallel context-parallel-degree ring-attention ulysses sequence-parallel-size sp: Use --context-parallel-size;
    the flag --sequence-parallel belongs to tensor parallelism.
ep ep-size expert-parallel expert-parallel-size expert-parallel-degree: Use --expert-model-parallel-size.
dp dp-size dp-degree data-parallel data-parallel-size data-parallel-degree data-parallel-replicate-degree ddp: The data-parallel
    size follows: number of ranks / (tensor x context x pipeline size). Set the number of ranks by --nproc or the launcher.
zero zero1 zero2 zero3 sharding sharding-strategy data-parallel-shard-degree: Use --data-parallel-sharding-strategy optim (ZeRO-1),
    optim_grads (ZeRO-2) or optim_grads_params (ZeRO-3).
strategy: Use --data-parallel-sharding-strategy, and --tensor-model-parallel-size, --pipeline-model-parallel-size and
    --context-parallel-size.
offload cpu-offload offload-optimizer offload-optimizer-device: Use --optimizer-cpu-offload.
offload-param offload-params: Use --fsdp-params-cpu.
gpus num-gpus ngpus n-gpus devices num-devices nproc-per-node nproc-per-gpu gpus-per-process num-proc-per-node: One process runs
    per device: use --nproc N on one node, or torchrun on several.
nodes nnodes num-nodes node-rank master-addr master-port rdzv-endpoint: Start one launcher per node: torchrun --nnodes N ...
    pretrain_gpt.py (docs/launching.md).
accelerator use-cpu cpu gpu cuda no-cuda: Use --device cpu or cuda; by default a run uses GPUs if there are any.
precision mixed-precision dtype amp autocast torch-dtype compute-dtype param-dtype fp32 float32 float16 half bfloat16: Use --bf16
    or --fp16; without them a run computes in float32.
fp8 float8 use-fp8 enable-float8: Use --fp8-format hybrid, with --bf16.
tf32 allow-tf32: Use --fp32-matmul-precision.
max-grad-norm grad-clip gradient-clip-val gradient-clipping clip-grad-norm clip-norm max-norm grad-norm-clip gradient-clip
    clip-gradients grad-clip-norm: Use --clip-grad.
beta1 beta-1 adam-b1: Use --adam-beta1.
beta2 beta-2 adam-b2: Use --adam-beta2.
betas adam-betas: Use --adam-beta1 and --adam-beta2.
eps epsilon adam-epsilon optimizer-eps: Use --adam-eps.
momentum: Use --sgd-momentum, or --adam-beta1.
wd decay weight-decay-rate l2: Use --weight-decay.
optim optim-type optimizer-type optimizer-name opt: Use --optimizer.
label-smoothing-factor: Use --label-smoothing.
ema use-ema: Use --ema-decay.
z-loss zloss softmax-auxiliary-loss: Use --z-loss-coeff.
dataset data train-data train-file data-dir data-root dataset-path dataset-name training-data train-path train-files dataset-dir
    data-file corpus train-dataset data-files dataset-dirs datasets: Use --data-path PREFIX, a dataset that
    tools/preprocess_data.py has made from text; --mock-data needs none.
val-data eval-data validation-file valid-data validation-data eval-dataset val-data-path eval-data-path val-path validation-path:
    Use --valid-data-path, or --split, which takes a share of --data-path.
val-split train-split validation-split test-split train-val-split eval-fraction validation-split-percentage: Use --split, such as
    99,1,0.
tokenizer tokenizer-name tokenizer-path tokenizer-dir tokenizer-file hf-tokenizer encoding vocab: Use --tokenizer-model FILE, and
    --tokenizer-type if the type does not follow from the file.
num-proc workers n-workers dataloader-num-workers data-workers num-data-workers: Use --num-workers.
cache-dir data-cache dataset-cache-dir: Use --data-cache-path.
random-seed data-seed rng-seed manual-seed: Use --seed.
torch-compile use-compile compile-model: Use --compile.
flash-attention use-flash-attention flash-attn flash sdpa attn-implementation attn-impl use-flash attention-implementation: Use
    --attention-backend auto, the default, which uses flash attention wherever it is available.
deterministic deterministic-algorithms: Use --deterministic-mode.
profiler enable-profiling trace: Use --profile, or --save-trace for a trace of tensors.
eval-only only-eval validate-only do-eval evaluate: Use --skip-train, which computes the losses of validation and test data, or
    tools/evaluate.py on a checkpoint.
predict do-predict: Use tools/generate_text.py or tools/evaluate.py on a checkpoint.
do-train train pretrain: This program always trains; --dry-run only plans the run.
generate prompt: Use tools/generate_text.py on a checkpoint.
sample sample-every sample-freq sample-steps sample-every-n-steps generate-every sampling-interval: Use --sample-interval, in steps.
overwrite-output-dir overwrite: Nothing is overwritten. Choose another folder for --save, or use --load to resume.
push-to-hub hub-model-id: Export a checkpoint by tools/checkpoint.py export.
lora use-lora peft lora-r r: Use --lora-rank, with --lora-alpha and --lora-targets.
preempt preemption slurm ctrl-c interrupt sigterm handle-signals: No flag is needed: on SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and
    others a run saves a checkpoint and exits with --exit-signal-code, and --load FOLDER resumes it (docs/survival.md).
    For another signal, use --exit-signal; --exit-duration-in-mins ends a run before a time limit.
timeout ddp-timeout nccl-timeout dist-timeout init-timeout: Use --distributed-timeout-minutes for collectives, or
    --exit-duration-in-mins to save and end before a time limit.
debug log-level quiet: Use --verbose for more lines, --log-interval for fewer, or --timing-log-level for times.
"""
"""Names of flags in other frameworks, and the advice for each row. An indented line continues its row."""


@cache
def read_synonyms() -> dict[str, str]:
    """Return the advice for every name of another framework, by the name without its leading dashes."""
    advice_by_name: dict[str, str] = {}
    for row in _TABLE.strip().replace("\n    ", " ").splitlines():
        names, _, advice = row.partition(": ")
        for name in names.split():
            assert name not in advice_by_name, name
            advice_by_name[name] = advice
    return advice_by_name


def find_advice(name: str) -> str | None:
    """Return which flags of this project take the place of a flag of another framework; None if the name is unknown.

    Args:
        name: name without leading dashes. It may have a section in front, as in torchtitan's `training.steps`.
    """
    synonyms = read_synonyms()
    full_name = re.sub(r"[._]", "-", name.lower())
    last_name = re.sub("_", "-", name.lower().rpartition(".")[2])
    advice = synonyms.get(full_name) or synonyms.get(last_name)
    if advice is None and last_name != full_name and find_flag(last_name) is not None:
        return f"Use --{last_name}."
    return advice
