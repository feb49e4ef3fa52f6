"""Flags of Megatron-LM that are not settings of this project.

They are refused with a reason, replaced by flags of this project, or accepted with a note that they have no effect.

The flags are listed in tables. Each row has the names of flags without the leading dashes, a colon, and a text for all of these
flags. An indented line continues its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.spec.schedules import list_split_backward_schedules

_DEFERRED = f"--pipeline-schedule {' and '.join(list_split_backward_schedules())}, to fill the bubble"

_NO_EFFECT = f"""
use-mcore-models: there is one implementation of the model
use-flash-attn: --attention-backend auto, the default, uses flash attention wherever it is available
attention-softmax-in-fp32: softmax is always computed in at least float32
apply-query-key-layer-scaling: softmax is always computed in at least float32, so scores need no scaling by the layer number
accumulate-allreduce-grads-in-fp32: gradients of a 16-bit model are always summed in float32, and reduced in float32 unless
    --grad-reduce-in-bf16 is set
exit-signal-handler: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU always save a checkpoint and exit
no-save-rng no-load-rng: random numbers follow from the seed and the step; there is no generator state to save or load
no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm:
    torch selects the kernels; no switch is needed
no-gradient-accumulation-fusion: weight gradients are always added straight into the gradient buffer
no-async-tensor-model-parallel-allreduce: the input gradient's all-reduce always overlaps the weight gradient
cross-entropy-loss-fusion cross-entropy-fusion-impl=: loss and gradient are always computed together, over the logits
no-clone-scatter-output-in-embedding: the embedding's output is never a view of a larger tensor
no-gradient-reduce-div-fusion: gradients are summed; the loss carries the scale
no-scatter-gather-tensors-in-pipeline: the communication between pipeline stages is not a setting
overlap-p2p-communication-warmup-flush: --overlap-p2p-communication holds in every phase of a schedule
no-position-embedding: with rotary positions the model has no position embedding that could be removed
use-cpu-initialization: initial values are always drawn on the CPU and do not depend on the layout
no-initialization: initialization is fast; a checkpoint replaces the initial values
init-model-with-meta-device: the model is always built on the meta device; memory is then allocated for the tensors of this rank
use-megatron-fsdp use-custom-fsdp: only --data-parallel-sharding-strategy sets what is sharded (by default nothing, as in
    Megatron-LM)
no-align-grad-reduce no-align-param-gather: each pipeline stage always communicates as soon as it can, without waiting for other
    stages
overlap-param-gather-with-optimizer-step: each bucket is always gathered while the next buckets are updated
use-precision-aware-optimizer: main parameters, main gradients and moments of a 16-bit model are float32, its defaults
use-torch-optimizer-for-cpu-offload: --optimizer-cpu-offload always uses torch's optimizers
overlap-cpu-optimizer-d2h-h2d: with --optimizer-cpu-offload copies always overlap with backward and with the update
calculate-per-token-loss: the loss is always a sum over tokens divided by the global token count
no-create-attention-mask-in-dataloader: attention is causal and no mask is ever created
no-mmap-bin-files num-dataset-builder-threads=: how the indexed files are read is not a setting
use-pytorch-profiler: --profile always uses torch's profiler
log-validation-ppl-to-tensorboard: the validation perplexity is always written
ckpt-fully-parallel-save: every rank always writes only its own shards
ckpt-fully-parallel-load: every rank always reads only its own shards
ckpt-assume-constant-structure: the save plan is always made once and reused
use-persistent-ckpt-worker: with --async-save, each rank has one writer process for the whole run
dist-ckpt-optim-fully-reshardable: optimizer state always fits every layout
auto-detect-ckpt-format use-dist-ckpt: there is one checkpoint format
no-one-logger enable-one-logger one-logger-*=... app-tag-*=...: nothing is ever sent to one-logger
tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad disable-tp-comm-*=...: --tp-comm-overlap cannot be set for individual matrix products
*cuda-graph*=...: CUDA graphs are not supported yet
nccl-*=... use-nccl-*=... *sharp*=...: NCCL is configured in the environment (NCCL_...)
*straggler*=...: --straggler-interval N reports ranks that compute longer than their peers
no-pin-cpu-*=...: host memory that --optimizer-cpu-offload copies to or from a GPU is always pinned
train-sync-interval=: the host already synchronizes with the device once per iteration
fp16-lm-cross-entropy: the loss is always computed in at least float32
overlap-moe-expert-parallel-comm: only the shared expert is computed during the all-to-all of the tokens
disable-msc: the multi-storage client is never used
no-barrier-with-level-1-timing: timers never wait for other ranks
transformer-impl=: there is one implementation of the layers, in torch
dataloader-type=single,cyclic: samples are always read in a shuffled order, and each epoch has its own order
ckpt-format=torch,torch_dist,torch_dcp,zarr,fsdp_dtensor: there is one checkpoint format, which fits every layout;
    tools/checkpoint.py reads others
dist-ckpt-strictness=: a checkpoint must always contain exactly the expected tensors
verify-integrity: checksums of all files are always written, and checked when a checkpoint is loaded
no-ckpt-fully-parallel-save: every rank always writes only its own shards
main-params-dtype=fp32: main parameters of a 16-bit model are always float32
main-grads-dtype=fp32,bf16: main gradients of a 16-bit model are always float32
exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32: the optimizer's moments have the dtype of the main parameters
rerun-mode=disabled: iterations are never run twice
moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-use-legacy-grouped-gemm: matrix products of experts are always grouped,
    and torch selects the kernels
moe-shared-expert-overlap: the shared expert is always computed during the all-to-all of the tokens
moe-per-layer-logging: the metrics of experts are always recorded for each layer too (--metrics-file, TensorBoard)
tensorboard-queue-size=: TensorBoard's own queue is used
log-batch-size-to-tensorboard log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard
    no-log-learning-rate-to-tensorboard: TensorBoard always receives this value
log-world-size-to-tensorboard: the start-up log and the saved config contain the layout
log-progress: --metrics-file records the progress, one JSON object per line
log-energy: energy is not measured
logging-level=: the log has one level; --log-interval sets how often it is written
empty-unused-memory-level=: buffers are allocated once, so the memory cache is never emptied
check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad: a loss or gradient that is not finite always stops the run
disable-gloo-process-groups: hosts always communicate by gloo, in addition to NCCL
microbatch-group-size-per-virtual-pipeline-stage=: the interleaved schedule selects the group size itself, for any number of
    microbatches
defer-embedding-wgrad-compute wgrad-deferral-limit= delay-wgrad-compute: weight gradients are deferred by {_DEFERRED}
use-nccl-ub fsdp-double-buffer fsdp-manual-registration fsdp-db-use-persist-buf-on-alloc-fail: torch's fully_shard selects the
    buffers for gathered blocks
suggested-communication-unit-size=: blocks are gathered individually, and the next block is always prefetched
ddp-average-in-collective: gradients are summed and the loss carries the scale
tp-comm-bootstrap-backend=: overlapped communication uses torch's collectives
fp8-margin= fp8-interval= fp8-amax-history-len= fp8-amax-compute-algo=: they belong to delayed scaling; here scales are computed
    from the current values (--fp8-recipe tensorwise, rowwise or blockwise), without a history or a margin
fp8-param-gather fp8-param: weights are stored and gathered in bfloat16, and quantized for each matrix product
tokenizer-library=: the type of the tokenizer follows from its files or from --tokenizer-type
data-impl=mmap,lazy,cached,infer: indexed files are always mapped into memory
DDP-impl=: gradients are reduced in buckets; --overlap-grad-reduce overlaps the reduction with backward
use-contiguous-parameters-in-local-ddp no-contiguous-buffers-in-local-ddp: gradients are always in contiguous buffers
local-rank= rank= lazy-mpu-init: the launcher sets it in the environment (RANK, LOCAL_RANK, WORLD_SIZE), as torchrun does
dataset=MMAP,LLama-Pretrain-Idxmap max-padding-length=: samples of --seq-length tokens are cut from indexed files (--data-path)
train-mode=pretrain: only pretraining is supported
test-mode: --check-replicas-every and --sentinel-interval set the checks of a run
high-priority-stream-groups=...: tensor-parallel groups and messages between pipeline stages always have streams of high priority
no-manual-gc-eval: with --manual-gc, garbage is always collected after evaluations and saves
openai-gelu: the default activation is this approximation of GELU
use-te-activation-func: torch computes the same activation functions
use-ring-exchange-p2p: the communication between pipeline stages is not a setting
enable-experimental: no feature is hidden behind a switch
"""
"""Flags whose effect is always on or cannot matter here, with the reason.

A name with ``=`` takes one value: one of the listed values, or any value if none is listed. ``=...`` takes any number of
values. Other names are switches. A name may be a pattern with ``*``.
"""

_TRANSLATIONS = """
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
"""Flags of Megatron-LM with another name here, with the flags that replace them. If values follow ``=``, only these are
replaced. ``{}`` stands for the value."""

_REFUSED = """
batch-size: Use --micro-batch-size, the sequences of one forward pass on a data rank, and --global-batch-size, those of a step on
    all devices.
model-parallel-size: Use --tensor-model-parallel-size.
warmup: Use --lr-warmup-iters, a number of steps, or --lr-warmup-fraction, a share of --lr-decay-iters.
persistent-save-interval: Use --save-interval.
decoder-num-layers: Use --num-layers.
decoder-seq-length: Use --seq-length.
yaml-cfg: Use --config, a file of flag names with their values.
record-memory-history: Use --profile, which also writes a memory snapshot.
memory-snapshot-path: Use --profile-dir.
moe-router-force-load-balancing moe-router-force-biased: A forced router trains nothing useful, and measurements with it are not
    realistic.
moe-router-topk-limited-devices: Use --moe-router-num-groups and --moe-router-group-topk.
moe-router-padding-* moe-pad-experts-for-* moe-apply-probs-on-input moe-latent-size moe-use-upcycling moe-upcycling-*: This feature
    of mixtures of experts is not supported yet.
moe-extended-tp: Use --expert-tensor-parallel-size.
distribute-saved-activations distribute-checkpointed-activations: Use --sequence-parallel, which splits the activations that
    recomputation saves, and others, over the tensor ranks.
cpu-offloading-weights: --data-parallel-sharding-strategy optim_grads_params frees gathered parameters, and --optimizer-cpu-offload
    moves optimizer state to host memory.
no-fp8-wgrad: Weight gradients are computed in FP8, like the other two matrix products of a linear layer.
fp8-quantizer-factory *-fp8-* fp4-format fp4-recipe fp4-param-gather fp4-quantizer-factory kitchen-*: Supported are --fp8-format
    e4m3 and hybrid, for the matrix products of linear layers.
*fsdp*: Use --data-parallel-sharding-strategy optim_grads_params, --fsdp-shard-size, --fsdp-reshard-after-forward,
    --fsdp-reduce-once and --fsdp-params-cpu to shard parameters.
muon-tp-mode: Muon uses full matrices at every layout; docs/optimizers.md describes the communication.
muon-fp32-matmul-prec: Matrix products of Muon use the dtype of --muon-dtype, bf16 by default.
muon-scalar-optimizer: AdamW updates embeddings, the output layer and vectors; --param-groups can select another optimizer for them.
muon-coefficient-type muon-coefficients: Every step of Muon uses the polynomial of Jordan et al. 2024.
ckpt-* dist-ckpt-* distrib-optim-*: There is one checkpoint format, which fits every layout.
non-persistent-*: Use --memory-save-interval, which saves the state in the memory of the nodes.
replication*: Use --replicate-state, the number of nodes that receive a copy.
inprocess-*: The launcher restarts a run that fails, and the run resumes from --load.
error-injection-*: Iterations are never run twice.
rl-* grpo-* langrl-* inference-* sft*: Only pretraining is supported.
mtp-use-repeated-layer mtp-hybrid-override-pattern: Each depth of --mtp-num-layers has its own layer, of the type of the last layer.
retro-* mamba-* hybrid-* vision-* dino-* biencoder-*: Only GPT- and Llama-style models are supported.
heterogeneous-*: All layers have the same shape.
adlr-autoresume*: Set --exit-duration-in-mins, or send SIGTERM: the run saves and exits.
num-distributed-optimizer-instances outer-dp-sharding-strategy enable-full-sharding-in-hsdp: With --data-parallel-sharding-strategy
    optim_grads_params, --fsdp-shard-size N shards within groups of N data ranks, which are replicas of each other; otherwise state
    is sharded over all data ranks.
offload-optimizer-states: --optimizer-cpu-offload and --optimizer-offload-fraction move main parameters and moments to host memory.
use-mp-args-from-checkpoint-args: A checkpoint can be loaded at any layout: set the layout that you want.
load-main-params-from-ckpt: Main parameters belong to the optimizer state, which is loaded unless --no-load-optim is set.
hierarchical-context-parallel-sizes: Context ranks exchange keys and values in one step (--cp-comm-type all_gather, a2a or p2p).
ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation: Use --ddp-bucket-size and
    --overlap-grad-reduce to set gradient buckets.
init-method-xavier-uniform embedding-init-method-std: Weights are drawn from a normal distribution (--init-method-std).
data-parallel-random-init: All data ranks start from the same weights.
mrope-section relative-attention-num-buckets: Rotary embeddings are set by --rotary-base, --rotary-percent, --rotary-interleaved,
    --rotary-seq-len-interpolation-factor, --use-rope-scaling, and --rope-type yarn, dynamic and longrope.
apply-residual-connection-post-layernorm: Residual connections add to the residual stream itself, not to its
    normalized values (--norm-placement sets the positions of norms).
qk-l2-norm: Use --qk-layernorm to normalize queries and keys.
use-legacy-models: There is one implementation of the model.
spec: The model is described by flags, not by a module.
padded-vocab-size: The size follows from the tokenizer, the tensor-parallel size and --make-vocab-size-divisible-by.
vocab-extra-ids tokenizer-metadata trust-remote-code legacy-tokenizer: Use --tokenizer-type and --tokenizer-model, or --vocab-file
    and --merge-file, or --vocab-size, to set the tokenizer.
decrease-batch-size-if-needed: The global batch size never changes automatically; set --global-batch-size for the layout.
check-for-spiky-loss check-for-large-grads: Use --spike-policy, which compares loss and gradient norm with those of earlier steps.
use-mup mup-base-hidden-size mup-width-mult: Use --mup-base-width, the hidden size at which the learning rates were tuned.
mup-base-head-dim mup-attn-scale-power: Use --mup-base-kv-channels; attention scores are then divided by the head size.
pipeline-model-parallel-comm-backend: Messages between pipeline stages use --distributed-backend.
distributed-timeout-seconds-after-init: The same timeout applies during the whole run (--distributed-timeout-minutes).
config-logger-dir: Use --print-config; the resolved config is also saved with the run.
deepspeed deepspeed-config deepspeed-activation-checkpointing no-pipeline-parallel ds-*: DeepSpeed is not supported, and its JSON
    file is not read. Remove these flags, and set --global-batch-size, --fp16 or --bf16, and --clip-grad.
zero-stage zero-*: Stage 1 is --data-parallel-sharding-strategy optim, stage 2 optim_grads, stage 3 optim_grads_params.
cpu-optimizer: Use --optimizer-cpu-offload.
train-tokens lr-decay-tokens lr-warmup-tokens: Use --train-samples, --lr-decay-samples and --lr-warmup-samples: tokens divided by
    --seq-length.
moe-expert-parallel-size: Use --expert-model-parallel-size.
moe-loss-coeff: Use --moe-aux-loss-coeff.
moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity: Use --moe-expert-capacity-factor.
train-weighted-split-paths* test-weighted-split-paths*: Use --train-data-path and --test-data-path.
valid-weighted-split-paths*: Use --valid-data-path NAME=WEIGHT PREFIX WEIGHT PREFIX ... NAME=..., with a blend for each named set.
valid-num-workers: Use --num-workers.
tokenizer-name-or-path: Use --tokenizer-type HuggingFaceTokenizer, with the model's tokenizer.json in --tokenizer-model.
patch-tokenizer-type extra-vocab-size: Use --tokenizer-type and --tokenizer-model to set the tokenizer, and --vocab-size to set the
    rows of the word embedding.
pad-vocab-size-to: Use --vocab-size, the rows of the word embedding.
pp-partition-method: Use --pipeline-split, or --pipeline-model-parallel-layout.
kill-switch-path: Send SIGTERM: the run saves and exits.
abort-on-unmet-fused-kernel-constraints: Use --attention-backend; a backend that cannot be used is refused.
dataset-provider model-provider: Only GPT- and Llama-style models of text are supported.
use-z-loss: Use --z-loss-coeff.
use-mpi: Start ranks with torchrun, which sets RANK, LOCAL_RANK and WORLD_SIZE for each rank.
wandb-name: Use --wandb-exp-name.
use-gcp-dynamic-checkpointing: Use --keep-last, the number of retained checkpoints.
"""
"""Refused flags with the reason or the flag to use instead. Names of other versions of Megatron-LM come first. A name may be a
pattern with ``*``."""

_EQUIVALENTS = """
moe-token-dispatcher-type=flex moe-enable-deepep moe-flex-* moe-deepep-* moe-hybridep-*: --moe-token-dispatcher-type alltoall; every
    token reaches the same experts, sent by torch's collectives
recompute-modules=moe_act: --recompute-modules mlp_act; it recomputes the activations of MLPs and shared experts
recompute-modules=moe: --recompute-modules mlp; it recomputes MLPs and experts
moe-layer-recompute: --recompute-granularity selective --recompute-modules mlp; it recomputes MLPs and experts
attention-backend=local: --attention-backend unfused; plain matrix products keep the attention probabilities
position-embedding-type=yarn: --position-embedding-type rope --rope-type yarn; YaRN is a type of rotary embedding
"""
"""Flags and values of Megatron-LM that compute the same as flags of this project, with the flags and a remark. A program that
converts a command replaces them. `pretrain_gpt.py` refuses them and names the replacement. A name may be a pattern with ``*``."""

_UNSUPPORTED_CHOICES = """
tokenizer-type=MultimodalTokenizer,SFTTokenizer,BertWordPieceLowerCase,BertWordPieceCase: is not supported yet; supported are
    byte-level BPE, tiktoken and sentencepiece files, bytes and NullTokenizer
tokenizer-type=PretrainedFromHF,Llama3Tokenizer,DeepSeekV2Tokenizer,DeepSeekV3Tokenizer,Qwen2Tokenizer: is a name of another
    program; use HuggingFaceTokenizer with the model's tokenizer.json in --tokenizer-model
recompute-modules=shared_experts: is not supported; core_attn, layernorm, mlp_act and mlp are, and mlp includes experts
recompute-modules=mla_up_proj: is not supported yet; core_attn, layernorm, mlp_act and mlp are
fp8-recipe=delayed: is refused: its scales depend on the values of earlier steps, a state that every layout, resume and
    recomputation would need and that the first step does not have; tensorwise is the same recipe with scales from the current
    values
fp8-recipe=mxfp8: is not supported yet (blocks of 32 numbers with scales that are powers of two); blockwise has blocks of 128
fp8-recipe=custom: is not supported; tensorwise, rowwise and blockwise are
moe-router-load-balancing-type=sinkhorn: is not supported; aux_loss, seq_aux_loss, global_aux_loss and none are
position-embedding-type=mrope,relative,alibi: is not supported yet; rope, learned_absolute and none are
dataloader-type=external: is refused: data comes from indexed files (--data-path); use single
exp-avg-dtype=fp16,bf16,fp8: is not supported: moments are float32; --optimizer adam8bit stores them in 8 bits
exp-avg-sq-dtype=fp16,bf16,fp8: is not supported: moments are float32; --optimizer adam8bit stores them in 8 bits
main-params-dtype=fp16: is not supported: main parameters are float32, and --data-parallel-sharding-strategy optim shards them
distributed-backend=mpi,ucc: is not supported; nccl and gloo are
"""
"""Values of flags that Megatron-LM supports and this project does not. Each text continues a message that begins with the
value."""


@dataclass(frozen=True)
class RefusedFlag:
    """Flag of Megatron-LM that this project refuses. `reason` is a sentence that says why, or which flag to use instead."""

    reason: str
    is_accepted = False


@dataclass(frozen=True)
class NoEffectFlag:
    """Flag of Megatron-LM that is accepted and has no effect: what it requests is always done, or does not matter in this
    project."""

    reason: str
    values: tuple[str, ...] | None
    """Values that the user may give to the flag. An empty tuple accepts any single value, None means a switch without a value,
    and ``("...",)`` accepts any number of values."""
    is_accepted = True

    def find_problem(self, values: Sequence[str]) -> str | None:
        """Return why the flag does not accept these values, as a text that continues the flag's name; None if it accepts them."""
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
class Translation:
    """Replacement of a flag of Megatron-LM by flags of this project."""

    is_accepted = False
    """The flag itself is not accepted; its replacement is."""
    template: str
    """Flags of this project that replace the flag. ``{}`` stands for the value of the replaced flag."""
    values: tuple[str, ...] | None
    """Values with which the flag is replaced. An empty tuple means any single value, None means a switch without a value."""

    def applies_to(self, values: Sequence[str]) -> bool:
        """Return whether the flag is replaced when the user gives it these values."""
        if self.values is None or len(values) != 1:
            return self.values is None and not values
        return not self.values or values[0] in self.values


def _parse_table(table: str) -> Iterator[tuple[str, tuple[str, ...] | None, str]]:
    """Parse a table of flags with rows of the form ``names: text``.

    Yields:
        (name, values, text) for each flag. ``values`` are those after ``=`` in the name, or None for a name without ``=``.
    """
    for row in table.strip().replace("\n    ", " ").splitlines():
        names, _, reason = row.partition(": ")
        for entry in names.split():
            name, has_values, values = entry.partition("=")
            yield name, tuple(filter(None, values.split(","))) if has_values else None, reason


@dataclass(frozen=True)
class Equivalent:
    """Flags of this project that compute the same as a flag of Megatron-LM, or as one of its values."""

    flags: str
    """Flags with their values, such as ``--recompute-modules mlp_act``."""
    remark: str
    """What computes the same, as a clause."""

    @property
    def reason(self) -> str:
        """Sentence for a refusal that names the replacement."""
        return f"Use {self.flags}, which computes the same: {self.remark}."


def _parse_equivalent(text: str) -> Equivalent:
    flags, _, remark = text.partition("; ")
    return Equivalent(flags, remark)


EQUIVALENT_FLAGS = {name: _parse_equivalent(text) for name, values, text in _parse_table(_EQUIVALENTS) if values is None}
"""Flags that compute the same as others, by name or pattern without the leading dashes."""
EQUIVALENT_CHOICES = {
    (name, value): _parse_equivalent(text) for name, values, text in _parse_table(_EQUIVALENTS) for value in values or ()
}
"""Values of flags that compute the same as others, by (flag name, value)."""
COMPAT_FLAGS: dict[str, RefusedFlag | NoEffectFlag] = {
    **{name: NoEffectFlag(reason, values) for name, values, reason in _parse_table(_NO_EFFECT) if "*" not in name},
    **{name: RefusedFlag(reason) for name, _, reason in _parse_table(_REFUSED) if "*" not in name},
    **{name: RefusedFlag(equivalent.reason) for name, equivalent in EQUIVALENT_FLAGS.items() if "*" not in name},
}
"""Flags of Megatron-LM that are not settings of this project, by name without the leading dashes."""
TRANSLATIONS = {name: Translation(template, values) for name, values, template in _parse_table(_TRANSLATIONS)}
"""Flags that are replaced by others, by name without the leading dashes. Some of them are also settings of this project; of
these, only some values are replaced."""
FLAG_PATTERNS: dict[str, RefusedFlag | NoEffectFlag] = {
    **{name: RefusedFlag(equivalent.reason) for name, equivalent in EQUIVALENT_FLAGS.items() if "*" in name},
    **{name: RefusedFlag(reason) for name, _, reason in _parse_table(_REFUSED) if "*" in name},
    **{name: NoEffectFlag(reason, values) for name, values, reason in _parse_table(_NO_EFFECT) if "*" in name},
}
"""Flags of Megatron-LM that are not settings of this project, by a pattern of their names. `COMPAT_FLAGS` has precedence."""
UNSUPPORTED_CHOICES = {
    **{(name, value): reason for name, values, reason in _parse_table(_UNSUPPORTED_CHOICES) for value in values or ()},
    **{
        choice: f"is not supported; {equivalent.flags} computes the same: {equivalent.remark}"
        for choice, equivalent in EQUIVALENT_CHOICES.items()
    },
}
"""Reason why a value of a flag is not supported, by (flag name, value)."""


def find_equivalent(name: str) -> Equivalent | None:
    """Return the flags that compute the same as a flag of Megatron-LM; None if there are none.

    Args:
        name: name of the flag without the leading dashes.
    """
    return next((equivalent for pattern, equivalent in EQUIVALENT_FLAGS.items() if fnmatchcase(name, pattern)), None)


def match_flag_pattern(name: str) -> RefusedFlag | NoEffectFlag | None:
    """Return the entry of the first pattern in `FLAG_PATTERNS`, such as ``moe-flex-*``, that matches a flag's name; None if none
    matches.

    A misspelled flag of this project can match a pattern too, so look for flags of this project first.

    Args:
        name: name of the flag without the leading dashes.
    """
    return next((flag for pattern, flag in FLAG_PATTERNS.items() if fnmatchcase(name, pattern)), None)
