"""Flags of Megatron-LM that are not settings here: refused with the reason, or accepted with a note that they change nothing.

A line of a table has names, without the two leading dashes, that share a reason; an indented one goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.spec.activations import FLAGS, spelled
from megatron.spec.schedules import names_that_split_backward

_DEFERRED = f"--pipeline-schedule {' and '.join(names_that_split_backward())}, to fill the bubble"
_ACTIVATION = f"The MLP's activation is GELU, {' or '.join(map(spelled, FLAGS))}."

_NO_EFFECT = f"""
use-mcore-models: there is one implementation of the model
use-flash-attn: --attention-backend auto, the default, takes flash attention where it can
attention-softmax-in-fp32: softmax is always computed in at least float32
apply-query-key-layer-scaling: softmax is always computed in at least float32, so nothing has to be scaled and scaled back
accumulate-allreduce-grads-in-fp32: gradients of a 16-bit model are always summed in float32, and reduced so unless
    --grad-reduce-in-bf16 is given
exit-signal-handler: SIGTERM and SIGUSR1 always save a checkpoint and exit
no-save-rng no-load-rng: random numbers follow from the seed and the step; there is no generator state to save or load
no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm:
    kernels are chosen by torch; no switch is needed
no-gradient-accumulation-fusion: weight gradients are always added straight into the gradient buffer
no-async-tensor-model-parallel-allreduce: the input gradient's all-reduce always overlaps the weight gradient
cross-entropy-loss-fusion cross-entropy-fusion-impl=: loss and gradient are always computed together, over the logits
no-clone-scatter-output-in-embedding: the embedding's output is never a view of a larger tensor
no-gradient-reduce-div-fusion: gradients are summed; the loss carries the scale
no-scatter-gather-tensors-in-pipeline: how tensors travel between pipeline stages is not a setting
overlap-p2p-communication-warmup-flush: --overlap-p2p-communication holds in every phase of a schedule
no-position-embedding: beside rotary positions there is no table that could be left out
use-cpu-initialization: initial values are always drawn on the CPU and do not depend on the layout
no-initialization: initial values cost little; a checkpoint replaces them
init-model-with-meta-device: the model is always built on the meta device, and then given memory for what the rank holds
use-megatron-fsdp use-custom-fsdp: --data-parallel-sharding-strategy alone says what is sharded (by default nothing, as there)
no-align-grad-reduce no-align-param-gather: each pipeline stage always communicates as soon as it can, without waiting for the
    others
overlap-param-gather-with-optimizer-step: a bucket is always gathered while the next ones are updated
use-precision-aware-optimizer: main parameters, main gradients and moments of a 16-bit model are float32, its defaults
use-torch-optimizer-for-cpu-offload: --optimizer-cpu-offload always updates by torch's optimizers
overlap-cpu-optimizer-d2h-h2d: with --optimizer-cpu-offload copies always overlap with backward and with the update
calculate-per-token-loss: the loss is always a sum over tokens divided by the global token count
no-create-attention-mask-in-dataloader: attention is causal and no mask is ever made
no-mmap-bin-files num-dataset-builder-threads=: how the indexed files are read is not a setting
use-pytorch-profiler: --profile always uses torch's profiler
log-validation-ppl-to-tensorboard: the validation perplexity is always written
ckpt-fully-parallel-save: every rank always writes only its own part
ckpt-fully-parallel-load: every rank always reads only its own part
ckpt-assume-constant-structure: who writes what is always planned once and kept
use-persistent-ckpt-worker: with --async-save one process beside each rank writes for the whole run
dist-ckpt-optim-fully-reshardable: optimizer state always fits every layout
auto-detect-ckpt-format use-dist-ckpt: there is one checkpoint format
no-one-logger enable-one-logger one-logger-*=... app-tag-*=...: nothing is ever sent to one-logger
tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad disable-tp-comm-*=...: how each product overlaps is not a setting beside
    --tp-comm-overlap
*cuda-graph*=...: CUDA graphs are not built yet
nccl-*=... use-nccl-*=... *sharp*=...: NCCL is configured in the environment (NCCL_...)
*straggler*=...: ranks that compute longer than their peers are told with --straggler-interval N
no-pin-cpu-*=...: what --optimizer-cpu-offload copies to and from a GPU is always pinned
train-sync-interval=: the host already waits for the device once an iteration
fp16-lm-cross-entropy: the loss is always computed in at least float32
overlap-moe-expert-parallel-comm: only the shared expert is computed while tokens travel
disable-msc: the multi-storage client is never used
no-barrier-with-level-1-timing: timers never wait for other ranks
transformer-impl=: there is one implementation of the layers, in torch
dataloader-type=single,cyclic: samples are always read in a shuffled order, in which each epoch is shuffled apart
ckpt-format=torch,torch_dist,torch_dcp,zarr,fsdp_dtensor: there is one checkpoint format, which fits every layout;
    tools/checkpoint.py reads others
dist-ckpt-strictness=: every tensor of a checkpoint must be there, and no other
verify-integrity: checksums of all files are always written, and compared when a checkpoint is loaded
no-ckpt-fully-parallel-save: every rank always writes only its own part
main-params-dtype=fp32: main parameters of a 16-bit model are always float32
main-grads-dtype=fp32,bf16: main gradients of a 16-bit model are always float32
exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32: the optimizer's moments have the dtype of the main parameters
rerun-mode=disabled: iterations are never run twice
moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-use-legacy-grouped-gemm: products of experts are always grouped, and
    kernels are chosen by torch
moe-shared-expert-overlap: the shared expert is always computed while tokens travel
moe-per-layer-logging: the log's numbers of experts are always of each layer too (--metrics-file, TensorBoard)
tensorboard-queue-size=: TensorBoard's own queue is used
log-batch-size-to-tensorboard log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard
    no-log-learning-rate-to-tensorboard: TensorBoard always gets it
log-world-size-to-tensorboard: the start-up log and the saved config hold the layout
log-progress: --metrics-file writes progress, one JSON object a line
log-energy: energy is not measured
logging-level=: there is one log; --log-interval says how often it speaks
empty-unused-memory-level=: buffers are allocated once, so the memory cache is never emptied
check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad: a loss or gradient that is not a number always stops the run
disable-gloo-process-groups: beside NCCL, gloo always carries what the hosts say to each other
microbatch-group-size-per-virtual-pipeline-stage=: the interleaved schedule chooses its rounds itself, for any number of
    microbatches
defer-embedding-wgrad-compute wgrad-deferral-limit= delay-wgrad-compute: weight gradients are put off by
    {_DEFERRED}
use-nccl-ub fsdp-double-buffer fsdp-manual-registration fsdp-db-use-persist-buf-on-alloc-fail: where blocks are gathered to is
    chosen by torch's fully_shard
suggested-communication-unit-size=: blocks are gathered one by one, the next always ahead
ddp-average-in-collective: gradients are summed and the loss carries the scale
tp-comm-bootstrap-backend=: pieces of tensors travel by torch's collectives
fp8-margin= fp8-interval= fp8-amax-history-len= fp8-amax-compute-algo=: they belong to delayed scaling; scales follow from the
    numbers at hand (--fp8-recipe tensorwise, rowwise or blockwise), so there is no history and no margin
fp8-param-gather fp8-param: weights are kept, and gathered, in bfloat16, and quantised for each product
tokenizer-library=: the kind of tokenizer follows from its files, or is --tokenizer-type
data-impl=mmap,lazy,cached,infer: indexed files are always mapped into memory
DDP-impl=: gradients are reduced in buckets; --overlap-grad-reduce does so while backward goes on
use-contiguous-parameters-in-local-ddp no-contiguous-buffers-in-local-ddp: gradients always lie in contiguous buffers
local-rank= rank= lazy-mpu-init: the launcher gives it in the environment (RANK, LOCAL_RANK, WORLD_SIZE), as torchrun does
dataset=MMAP,LLama-Pretrain-Idxmap max-padding-length=: samples of --seq-length tokens are cut from indexed files (--data-path)
train-mode=pretrain: only pretraining is built
test-mode: what a run checks of itself is set by --check-replicas-every and --sentinel-interval
high-priority-stream-groups=...: tensor ranks and messages between pipeline stages always have streams of high priority
no-manual-gc-eval: with --manual-gc garbage is always collected around evaluations and saves
use-ring-exchange-p2p: how tensors travel between pipeline stages is not a setting
enable-experimental: no feature is hidden behind a switch
"""
"""Flags whose effect is always on here or cannot matter. Those with = take one value: one of those behind it, or any."""

_TAKEN = """
checkpoint-activations activations-checkpoint: --recompute-granularity full
activations-checkpoint-granularity=: --recompute-granularity {}
activations-checkpoint-method=: --recompute-granularity full --recompute-method {}
activations-checkpoint-num-layers= checkpoint-num-layers=: --recompute-num-layers {}
use-rotary-position-embeddings: --position-embedding-type rope
use-torch-fsdp2: --data-parallel-sharding-strategy optim_grads_params
torch-fsdp2-no-reshard-after-forward: --fsdp-reshard-after-forward never
encoder-num-layers=: --num-layers {}
encoder-seq-length=: --seq-length {}
check-weight-hash-across-dp-replicas-interval=: --check-replicas-every {}
eval-iters=-1: --eval-iters 0
optimizer=dist_muon: --optimizer muon
embed-layernorm: --embedding-layernorm
"""
"""Names, and values (behind =), of Megatron-LM that have others here, as which they are taken; {} stands for the given value."""

_REFUSED = f"""
batch-size: Use --micro-batch-size.
model-parallel-size: Use --tensor-model-parallel-size.
warmup: Use --lr-warmup-fraction.
persistent-save-interval: Use --save-interval.
decoder-num-layers: Use --num-layers.
decoder-seq-length: Use --seq-length.
yaml-cfg: Use --config, a file of flag names with their values.
record-memory-history: Use --profile, which also writes a memory snapshot.
memory-snapshot-path: Use --profile-dir.
moe-router-force-load-balancing moe-router-force-biased: A router that is forced trains nothing and measures nothing real.
moe-router-topk-limited-devices: Use --moe-router-num-groups and --moe-router-group-topk.
moe-router-padding-* moe-pad-experts-for-* moe-apply-probs-on-input moe-latent-size moe-use-upcycling moe-upcycling-*: Of mixtures
    of experts this is not built yet.
moe-enable-deepep moe-flex-* moe-deepep-* moe-hybridep-*: Tokens travel by torch's collectives (--moe-token-dispatcher-type).
moe-layer-recompute: Use --recompute-granularity selective --recompute-modules mlp.
moe-extended-tp: Use --expert-tensor-parallel-size.
distribute-saved-activations distribute-checkpointed-activations: Use --sequence-parallel, which divides what recompute keeps over
    the tensor ranks, and more.
cpu-offloading-weights: Gathered parameters are freed by --data-parallel-sharding-strategy optim_grads_params, and optimizer state
    is kept in host memory by --optimizer-cpu-offload.
no-fp8-wgrad: The gradient of a weight is made in 8 bits, as the other two products are.
fp8-quantizer-factory *-fp8-* fp4-format fp4-recipe fp4-param-gather fp4-quantizer-factory kitchen-*: Of narrow
    formats there are --fp8-format e4m3 and hybrid, for the products of linear layers.
*fsdp*: Sharding of parameters is set by --data-parallel-sharding-strategy optim_grads_params, --fsdp-shard-size,
    --fsdp-reshard-after-forward, --fsdp-reduce-once and --fsdp-params-cpu.
muon-tp-mode: Muon sees every matrix whole at every layout; docs/optimizers.md says what that sends.
muon-fp32-matmul-prec: Muon's products are in the format of --muon-dtype, bf16 by default.
muon-scalar-optimizer: Muon leaves embeddings, the output layer and vectors to AdamW; --param-groups may name another for them.
muon-coefficient-type muon-coefficients: Muon's polynomial is that of Jordan et al. 2024 in every step.
ckpt-* dist-ckpt-* distrib-optim-*: There is one checkpoint format, which fits every layout.
non-persistent-*: Use --memory-save-interval, which keeps the state in the memory of the nodes.
replication*: Use --replicate-state, the number of nodes that get a copy.
inprocess-*: A run that dies is started again by the launcher and resumes from --load.
error-injection-*: Iterations are never run twice.
rl-* grpo-* langrl-* inference-* sft*: Only pretraining is built.
mtp-use-repeated-layer mtp-hybrid-override-pattern: Each depth of --mtp-num-layers has a layer of its own, of the kind of the last.
retro-* mamba-* hybrid-* vision-* dino-* biencoder-*: Only GPT- and Llama-style models are built.
heterogeneous-*: All layers have the same shape.
adlr-autoresume*: Set --exit-duration-in-mins, or send SIGTERM: the run saves and exits.
num-distributed-optimizer-instances outer-dp-sharding-strategy enable-full-sharding-in-hsdp: With --data-parallel-sharding-strategy
    optim_grads_params, --fsdp-shard-size N shards within groups of N data ranks, which are copies of each other; otherwise state is
    sharded over all data ranks.
offload-optimizer-states: Main parameters and moments are kept in host memory by --optimizer-cpu-offload and
    --optimizer-offload-fraction.
multiple-validation-sets: Several validation sets are not built yet; an evaluation reads one blend (--valid-data-path, or a share of
    --data-path).
full-validation: An evaluation reads --eval-iters batches.
use-mp-args-from-checkpoint-args: Any layout loads any checkpoint: give the layout that you want.
load-main-params-from-ckpt: Main parameters belong to the optimizer state, which is loaded unless --no-load-optim is given.
hierarchical-context-parallel-sizes: Context ranks share keys and values in one step (--cp-comm-type all_gather, a2a or p2p).
ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation: Gradient buckets are set by
    --ddp-bucket-size and --overlap-grad-reduce.
init-method-xavier-uniform embedding-init-method-std: Weights are drawn from a normal distribution (--init-method-std).
data-parallel-random-init: All data ranks start from the same weights.
mrope-section relative-attention-num-buckets: The rotary embedding knows --rotary-base, --rotary-percent,
    --rotary-interleaved, --rotary-seq-len-interpolation-factor, --use-rope-scaling, and --rope-type yarn, dynamic and longrope.
openai-gelu: {_ACTIVATION}
use-te-activation-func: Transformer Engine is not used.
apply-residual-connection-post-layernorm: What is added to is the residual stream itself (--norm-placement says where norms stand).
qk-l2-norm: Queries and keys are normalised by --qk-layernorm.
use-legacy-models: There is one implementation of the model.
spec: The model is described by flags, not by a module.
padded-vocab-size: The size follows from the tokenizer, TP and --make-vocab-size-divisible-by.
vocab-extra-ids tokenizer-metadata trust-remote-code legacy-tokenizer: The tokenizer is set by --tokenizer-type and
    --tokenizer-model, or --vocab-file and --merge-file, or --vocab-size.
skip-train: Only training with evaluations in between is built (--eval-interval, --eval-iters).
decrease-batch-size-if-needed: The global batch size never changes by itself; set --global-batch-size for the layout.
check-for-spiky-loss check-for-large-grads: Use --spike-policy, which judges loss and gradient norm by those of the steps before.
use-mup mup-base-hidden-size mup-width-mult: Use --mup-base-width, the hidden size at which the rates were tuned.
mup-base-head-dim mup-attn-scale-power: Use --mup-base-kv-channels; scores are then divided by the size of a head.
pipeline-model-parallel-comm-backend: Messages between pipeline stages go over --distributed-backend.
distributed-timeout-seconds-after-init: One time limit holds throughout (--distributed-timeout-minutes).
config-logger-dir: Use --print-config; the resolved config is also saved with the run.
deepspeed deepspeed-config deepspeed-activation-checkpointing no-pipeline-parallel ds-*: This is not DeepSpeed, and what its JSON
    file sets is not read. Leave them out, and set here --global-batch-size, --fp16 or --bf16 and --clip-grad.
zero-stage zero-*: Stage 1 is --data-parallel-sharding-strategy optim, stage 2 optim_grads, stage 3 optim_grads_params.
cpu-optimizer: Use --optimizer-cpu-offload.
train-tokens lr-decay-tokens lr-warmup-tokens: Use --train-samples, --lr-decay-samples and --lr-warmup-samples: tokens divided by
    --seq-length.
moe-expert-parallel-size: Use --expert-model-parallel-size.
moe-loss-coeff: Use --moe-aux-loss-coeff.
moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity: Use --moe-expert-capacity-factor.
train-weighted-split-paths* valid-weighted-split-paths* test-weighted-split-paths*: Use --train-data-path, --valid-data-path and
    --test-data-path.
valid-num-workers: Use --num-workers.
tokenizer-name-or-path: Use --tokenizer-type HuggingFaceTokenizer, with the model's tokenizer.json in --tokenizer-model.
patch-tokenizer-type extra-vocab-size: The tokenizer is set by --tokenizer-type and --tokenizer-model, and --vocab-size gives the
    rows of the word embedding.
pad-vocab-size-to: Use --vocab-size, the rows of the word embedding.
pp-partition-method: Use --pipeline-split, or --pipeline-model-parallel-layout.
kill-switch-path: Send SIGTERM: the run saves and exits.
abort-on-unmet-fused-kernel-constraints: Use --attention-backend with a name, which is refused where it cannot be used.
dataset-provider model-provider: Only GPT- and Llama-style models of text are built.
use-z-loss: Use --z-loss-coeff.
use-mpi: Start ranks with torchrun, which tells each its RANK, LOCAL_RANK and WORLD_SIZE.
wandb-name: Use --wandb-exp-name.
use-gcp-dynamic-checkpointing: Use --keep-last, the number of checkpoints that are kept.
exit-signal: SIGTERM and SIGUSR1 always save a checkpoint and exit; other signals are not a setting.
"""
"""Names of other versions; then flags, and patterns of flags, that ask for what does not exist here. Each with what to use."""

_CHOICES = """
tokenizer-type=MultimodalTokenizer,SFTTokenizer,BertWordPieceLowerCase,BertWordPieceCase: is not built yet; byte-level BPE, tiktoken
    and sentencepiece files, bytes and NullTokenizer are
tokenizer-type=PretrainedFromHF,Llama3Tokenizer,DeepSeekV2Tokenizer,DeepSeekV3Tokenizer,Qwen2Tokenizer: is of another program; with
    tokenizer.json of the model in --tokenizer-model, HuggingFaceTokenizer is the same
recompute-modules=moe,moe_act,shared_experts: is not built; core_attn, layernorm, mlp_act and mlp are, and mlp means experts too
recompute-modules=mla_up_proj: is not built yet; core_attn, layernorm, mlp_act and mlp are
fp8-recipe=delayed: is refused: its scales follow from what earlier steps saw, a state that no layout, resume or recompute could
    do without, and that a first step does not have; tensorwise is the same with the scales of the numbers at hand
fp8-recipe=mxfp8: is not built yet (blocks of 32 numbers with scales that are powers of two); blockwise has blocks of 128
fp8-recipe=custom: is not supported; tensorwise, rowwise and blockwise are
moe-router-load-balancing-type=sinkhorn: is not built; aux_loss, seq_aux_loss, global_aux_loss and none are
moe-token-dispatcher-type=flex: is not built; alltoall and allgather are
position-embedding-type=mrope,relative,alibi: is not built yet; rope, learned_absolute and none are
position-embedding-type=yarn: is --position-embedding-type rope with --rope-type yarn here
attention-backend=local: is not built; unfused (math) computes the same
dataloader-type=external: is refused: data comes from indexed files (--data-path); use single
exp-avg-dtype=fp16,bf16,fp8: is not built: moments are float32; --optimizer adam8bit keeps them in 8 bits
exp-avg-sq-dtype=fp16,bf16,fp8: is not built: moments are float32; --optimizer adam8bit keeps them in 8 bits
main-params-dtype=fp16: is not built: main parameters are float32, which --data-parallel-sharding-strategy optim divides
distributed-backend=mpi,ucc: is not supported; nccl and gloo are
"""
"""Choices of Megatron-LM that do not exist here, with those that do."""


@dataclass(frozen=True)
class Refused:
    """A flag that is refused, and what to use instead."""

    reason: str
    is_accepted = False


@dataclass(frozen=True)
class NoEffect:
    """A flag whose effect is always on, or cannot matter here."""

    reason: str
    values: tuple[str, ...] | None
    """The only values accepted, or empty for any; None for a switch. An ellipsis stands for any number of values."""
    is_accepted = True

    def fault(self, values: Sequence[str]) -> str | None:
        """Why the flag may not be given with these values, or None."""
        if self.values is None:
            return "is a switch and takes no value" if values else None
        if self.values == ("...",):
            return None
        if len(values) != 1:
            return f"takes one value, not {len(values) or 'none'}"
        if self.values and values[0] not in self.values:
            return f"is supported as {' or '.join(self.values)} only"
        return None


@dataclass(frozen=True)
class TakenAs:
    """A flag that is taken as others."""

    is_accepted = False
    """Not as it stands."""
    words: str
    """These, with {} for its value."""
    values: tuple[str, ...] | None
    """The only values for which it is, or empty for any; None for a switch."""

    def fits(self, values: Sequence[str]) -> bool:
        """Whether it is, with these values."""
        if self.values is None or len(values) != 1:
            return self.values is None and not values
        return not self.values or values[0] in self.values


def _entries(table: str) -> Iterator[tuple[str, tuple[str, ...] | None, str]]:
    """Each name of a table, with the values behind its =, if it has one, and its reason."""
    for line in table.strip().replace("\n    ", " ").splitlines():
        names, _, reason = line.partition(": ")
        for entry in names.split():
            name, takes_value, values = entry.partition("=")
            yield name, tuple(filter(None, values.split(","))) if takes_value else None, reason


KNOWN: dict[str, Refused | NoEffect] = {
    **{name: NoEffect(reason, values) for name, values, reason in _entries(_NO_EFFECT) if "*" not in name},
    **{name: Refused(reason) for name, _, reason in _entries(_REFUSED) if "*" not in name},
}
"""Flags of Megatron-LM that are no settings here, by name without the two leading dashes."""
TAKEN = {name: TakenAs(words, values) for name, values, words in _entries(_TAKEN)}
"""Flags that are taken as others, by name. With some values also settings are."""
FAMILIES: dict[str, Refused | NoEffect] = {
    **{name: Refused(reason) for name, _, reason in _entries(_REFUSED) if "*" in name},
    **{name: NoEffect(reason, values) for name, values, reason in _entries(_NO_EFFECT) if "*" in name},
}
"""Patterns of names that share a fate. A name that is known itself comes first."""
CHOICES = {(name, value): reason for name, values, reason in _entries(_CHOICES) for value in values or ()}
"""Why a value of a flag, known to Megatron-LM, is no choice here."""


def find_family(name: str) -> Refused | NoEffect | None:
    """The family of flags that a name belongs to by its form, such as ``moe-...``; a mistyped setting can look like one too."""
    return next((family for pattern, family in FAMILIES.items() if fnmatchcase(name, pattern)), None)
