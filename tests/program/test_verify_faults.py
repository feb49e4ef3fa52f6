"""tools/verify_layout.py with a fault planted in the source: each is found, and its place is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted import EXPERTS, Fault, assert_found, verify

LATENT = (
    "--position-embedding-type rope --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 5"
)


FAULTS = {
    "a gradient not reduced over the tensor group": Fault(
        (
            (
                "pending = start_all_reduce(grad_input, group)",
                "pending = Pending(grad_input)",
            ),
        ),
        "--tensor-model-parallel-size 2",
        "gradient",
        "final_norm.bias",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "pieces of a gathered input in the order in which they come": Fault(
        (("rank_rows[first_rank - step]", "rank_rows[step - 1]"),),
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "scales of a rank's own numbers": Fault(
        (("if not any(needs_reduce):", "if True:"),),
        "--tensor-model-parallel-size 2 --bf16 --fp8-format hybrid",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "an input in 8 bits that is turned round without new scales": Fault(
        (
            (
                "        scaled_matmul_into(into, a, b, add=add)\n",
                "        amax = compute_amax(x, self._token_granularity)\n"
                "        turned = quantize(x, amax, self._token_granularity, E4M3).dequantize()\n"
                "        _ = (into.add_ if add else into.copy_)(a.dequantize() @ turned)\n",
            ),
        ),
        "--bf16 --fp8-format hybrid --fp8-recipe rowwise",
        "gradient",
        "layers.1.mlp.down.weight (layer 1)",
        None,
        ("differs by no constant factor", "likewise layers.1.mlp.up.weight"),
    ),
    "adapters whose low channels are not summed over tensor ranks": Fault(
        (("parallel_config if splits_inputs else local_config)", "local_config)"),),
        "--tensor-model-parallel-size 2 --lora-rank 2",
        "forward",
        "layers.0.attention (layer 0)",
        "tensor",
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "divided twice by the data size": Fault(
        (
            (
                "self.scaler.scale / pending_count.wait().clamp(min=1.0)",
                "self.scaler.scale / pending_count.wait().clamp(min=1.0) / self.context.data_group.size",
            ),
        ),
        "--world-size 2",
        "gradient",
        "final_norm.bias",
        "data",
        ("0.5x, 1 / the data size", "so are the gradients of all parameters"),
    ),
    "a tied embedding that is not joined": Fault(
        (("if self.plan.tied:\n            all_reduce", "if False:\n            all_reduce"),),
        "--pipeline-model-parallel-size 2",
        "gradient",
        "embedding.word.weight (stages 0 and 1)",
        "pipeline",
        ("the gradient of the tied embedding is not reduced",),
        stages=(0, 1),
    ),
    "a group's factor applied to its neighbour": Fault(
        (
            (
                "                get_group(shard.record),\n",
                "                get_group(shards[span.param_index - 1].record),\n",
            ),
        ),
        "--world-size 2 --param-groups '*.mlp.up.weight lr-mult=0.25'",
        "update",
        "layers.0.attention.output.weight (layer 0)",
        None,
        ("the change is 0.25x what it should be", "likewise layers.1.attention.output.weight"),
    ),
    "sums over the rows of a slice for those of the matrix": Fault(
        (
            (
                "all_reduce(statistics_buffer.data, group, statistics_buffer.op)",
                'all_reduce(statistics_buffer.data, self._context.group("tp"), statistics_buffer.op)',
            ),
        ),
        "--world-size 2 --use-distributed-optimizer --optimizer adafactor --disable-bias-linear --ddp-bucket-size 2000",
        "update",
        "embedding.word.weight",
        None,
        ("the gradient is right, the update is not",),
    ),
    "a matrix orthogonalised without the rows of another rank": Fault(
        (
            (
                "received_copies.append((view_slice(self.full_matrices, transfer, slice_index), received))",
                "received_copies.append((view_slice(self.full_matrices, transfer, slice_index), "
                "received if transfer.sender == stage_rank else torch.zeros_like(received)))",
            ),
        ),
        "--tensor-model-parallel-size 2 --optimizer muon --muon-momentum 0.5",
        "update",
        "layers.0.attention.qkv.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
    ),
    "scores clipped by what one data rank has seen": Fault(
        (
            (
                "all_reduce(self.model.logit_tracker.max_logits, self.context.world, dist.ReduceOp.MAX)",
                "self.model.logit_tracker.max_logits",
            ),
        ),
        "--world-size 2 --qk-clip --qk-clip-threshold 1e-4",
        "update",
        "layers.0.attention.qkv.weight (layer 0)",
        "data",
        ("the gradient is right, the update is not",),
    ),
    "momentum of another slice": Fault(
        (("values[shard_range.start : shard_range.stop]", "values[: shard_range.stop - shard_range.start]"),),
        "--world-size 2 --use-distributed-optimizer --optimizer muon --swiglu",
        "update",
        "layers.0.mlp.up.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
    ),
    "blocks of 8 bits that begin where a slice does": Fault(
        (("head_length = min(row_length, -first_column % self.block_size)", "head_length = 0"),),
        "--world-size 3 --global-batch-size 6 --use-distributed-optimizer --optimizer adam8bit",
        "update",
        "layers.0.mlp.down.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
        step=2,
    ),
    "blocks of 8 bits with a scale on each tensor rank": Fault(
        (("block_max = moment.abs().amax(-1) if self.shared_max is None", "block_max = moment.abs().amax(-1) if True"),),
        "--world-size 2 --tensor-model-parallel-size 2 --optimizer adam8bit",
        "update",
        "layers.0.attention.output.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
        step=2,
    ),
    "places in a sample of another context rank": Fault(
        (("self.splitter.sample_split.get_positions(self.splitter.group.rank))", "self.splitter.sample_split.get_positions(0))"),),
        "--world-size 4 --context-parallel-size 2",
        "forward",
        "embedding",
        None,
        ("positions 4 to 11 differ, the others agree; only on context rank 1",),
    ),
    "the halves of a context rank swapped": Fault(
        (
            (
                "        positions = sequence_split.get_positions(self.group.rank)\n",
                "        positions = np.roll(sequence_split.get_positions(self.group.rank), sequence_split.segment_length)\n",
            ),
        ),
        "--world-size 2 --context-parallel-size 2",
        "forward",
        "embedding",
        None,
        ("the output of the embedding differs",),
    ),
    "bounds of documents lost where context ranks cut": Fault(
        (
            (
                "self.documents if self.documents.is_packed else None",
                "self.documents if self.documents.is_packed and self.query_range == self.key_range else None",
            ),
        ),
        "--world-size 2 --context-parallel-size 2 --reset-attention-mask",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree", "the scale or the mask"),
    ),
    "parts of attention added as if their sums were one": Fault(
        (("out.mul_(out_weight).addcmul_(pair_out, pair_weight)", "out.add_(pair_out)"),),
        "--world-size 2 --context-parallel-size 2 --cp-comm-type p2p",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("positions 4 to 15 differ, the others agree",),
    ),
    "gradients of keys that are not added on their way round": Fault(
        (("                grads += pending.wait()\n", "                pending.wait()\n"),),
        "--world-size 2 --context-parallel-size 2 --cp-comm-type p2p",
        "gradient",
        "layers.1.attention.qkv.bias (layer 1)",
        None,
        ("16 rows from 4 on of 24",),
    ),
    "gradients summed over data ranks alone": Fault(
        (
            (
                "weight.has_partial_tp_grad(sequence_parallel) else GRADIENT_AXES",
                "weight.has_partial_tp_grad(sequence_parallel) else ('dp',)",
            ),
        ),
        "--world-size 4 --context-parallel-size 2",
        "gradient",
        "final_norm.bias",
        "context",
        ("the sum over the context group is missing",),
    ),
    "a layer dropped": Fault(
        (
            (
                "Chunk(index, len(stages), stage, range(stop - count, stop))",
                "Chunk(index, len(stages), stage, range(stop - count, stop - index))",
            ),
        ),
        "--pipeline-model-parallel-size 2",
        "parameters",
        "layers.3 (layer 3, on no stage)",
        None,
        ("the layer is dropped",),
        step=0,
        stages=(),
    ),
    "a wrong rotary offset on stage 2": Fault(
        (
            (
                "        self.qkv = ",
                '        self.stage = scope.context.group("pp").rank\n        self.qkv = ',
            ),
            (
                "q, k, v = split_qkv(qkv, None if has_qk_norm else rotary, self.interleaved)",
                "q, k, v = split_qkv(qkv, rotary.roll(1, 0) if self.stage == 2 else rotary, self.interleaved)",
            ),
        ),
        "--pipeline-model-parallel-size 4 --position-embedding-type rope",
        "forward",
        "layers.2.attention (layer 2, stage 2)",
        None,
        ("the output of attention differs, although all earlier outputs agree", "the first token of a sample", "rotary positions"),
        stages=(2,),
    ),
    "a window that is one token too short": Fault(
        (
            (
                "is_masked |= key_positions < query_positions - self.window",
                "is_masked |= key_positions <= query_positions - self.window",
            ),
        ),
        "--pipeline-model-parallel-size 2 --window-size 9,0 --window-attn-skip-freq [0,0,1,0]",
        "forward",
        "layers.2.attention (layer 2, stage 1)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
        stages=(1,),
    ),
    "the rotary base of the other kind of layer": Fault(
        (("x = forward(x, tables[rotary],", "x = forward(x, tables[next(iter(tables))],"),),
        "--position-embedding-type rope --window-size 9,0 --window-attn-skip-freq 2 --rotary-base-local 100",
        "forward",
        "layers.1.attention (layer 1)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "a capped logit without the slope of its cap": Fault(
        (("block_logits.copy_(block_grad.mul_(derivative))", "block_logits.copy_(block_grad)"),),
        "--tensor-model-parallel-size 2 --final-logit-softcapping 0.3 --loss-chunk-tokens 4",
        "gradient",
        "final_norm.bias",
        None,
        ("differs by no constant factor", "so are the gradients of all parameters"),
    ),
    "a norm behind a layer whose gradient is of a part of the sequence": Fault(
        (
            (
                "(sequence_parallel or self.applies_to_local_heads)",
                '(sequence_parallel and "_post_" not in self.name or self.applies_to_local_heads)',
            ),
        ),
        "--tensor-model-parallel-size 2 --sequence-parallel --norm-placement sandwich",
        "gradient",
        "layers.1.mlp_post_norm.bias",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "a sink that the softmax forgets": Fault(
        (("denominator += (sink_scores - row_max).exp_()", "denominator += 0 * (sink_scores - row_max)"),),
        "--tensor-model-parallel-size 2 --softmax-type learnable",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "a mean square over a rank's own heads": Fault(
        (("in zip(all_reduce(sq_sums, group), sizes, strict=True)", "in zip(sq_sums, sizes, strict=True)"),),
        "--tensor-model-parallel-size 2 --normalization RMSNorm --qk-layernorm --qk-layernorm-all-heads",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "the gradient of a latent's norm, not summed over the parts of the sequence": Fault(
        (
            (
                "return not self.splits and (sequence_parallel",
                'return not self.splits and (sequence_parallel and "latent" not in self.name',
            ),
        ),
        f"--tensor-model-parallel-size 2 --sequence-parallel {LATENT} --qk-layernorm",
        "gradient",
        "layers.1.attention.kv_latent_norm.bias (layer 1)",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "the rotated key that all heads share, with the gradient of a rank's own": Fault(
        (("grad_output = all_reduce(grad_output.clone(), group)", "pass"),),
        f"--tensor-model-parallel-size 2 {LATENT} --q-lora-rank 12",
        "gradient",
        "layers.1.attention.k_rotary.weight (layer 1)",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "the rotated key of another sample": Fault(
        (("k[..., nope_dim:] = shared_key", "k[..., nope_dim:] = shared_key.roll(1, 1)"),),
        f"--pipeline-model-parallel-size 2 {LATENT}",
        "forward",
        "layers.0.attention (layer 0, stage 0)",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "a bucket reduced before its last gradient": Fault(
        (
            (
                "if self._overlaps_backward and num_complete == self._num_microbatches:",
                "if self._overlaps_backward and num_complete == self._num_microbatches - 1:",
            ),
        ),
        "--world-size 2 --global-batch-size 12 --overlap-grad-reduce",
        "gradient",
        "final_norm.bias",
        "data",
        ("microbatch 2 of data rank", "missing: reduced before the last gradient was in it"),
    ),
    "weights gathered while others compute, and not waited for": Fault(
        (
            (
                "unit.register_forward_pre_hook(partial(_finish_param_gathers, unit_buckets))",
                "pass",
            ),
        ),
        "--world-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "loss",
        "output",
        None,
        ("the weights are right", "values of parameters that are used before they arrive"),
        step=2,
    ),
    "a message read before it is here": Fault(
        (
            (
                "        for work in works:\n            work.wait()\n        return buffers",
                "        return buffers",
            ),
        ),
        "--pipeline-model-parallel-size 2",
        "forward",
        "layers.2.attention (layer 2, stage 1)",
        None,
        ("the input from stage 0 may be wrong too",),
        stages=(1,),
    ),
    "a buffer used again while it is reduced": Fault(
        (
            (
                "self._grad_pool.release_after(self._grad_buffer, pending.wait)",
                "self._grad_pool.release_after(self._grad_buffer, lambda: None)",
            ),
        ),
        "--world-size 2 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --ddp-bucket-size 2000",
        "transfer",
        "the input of a reduce-scatter of",
        None,
        ("elements over ranks 0, 1", "it was overwritten before it was sent"),
    ),
    "gradients that are reduced once, without the first microbatches": Fault(
        (
            (
                "(self._num_microbatches if reduces_once else 1)):\n            return",
                "(self._num_microbatches if reduces_once else 1)):\n"
                "            self._sinks[index].is_written = False\n            return",
            ),
        ),
        "--world-size 2 --global-batch-size 12 --data-parallel-sharding-strategy optim_grads_params --fsdp-reduce-once",
        "gradient",
        "final_norm.bias",
        None,
        ("only the last microbatch is in it: each overwrites those before it",),
    ),
    "dropout on in evaluation": Fault(
        (
            (
                "            num_workers=num_workers,\n            has_dropout=False,\n",
                "            num_workers=num_workers,\n            has_dropout=True,\n",
            ),
        ),
        "--world-size 2",
        "evaluation",
        "the held-out batches",
        None,
        ("though training with the same weights agrees", "dropout is on where it should be off"),
        step=0,
    ),
    "gradients of experts summed over the other grid's data ranks": Fault(
        (("        return EXPERT_AXES[-1:]\n", "        return GRADIENT_AXES\n"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS}",
        "gradient",
        "layers.1.mlp.experts",
        None,
        (),
    ),
    "copies of experts whose gradients are not added": Fault(
        (
            (
                "if replica_group.process_group is None:",
                "if replica_group.process_group is None or axes[0] in ('etp', 'ep', 'edp'):",
            ),
        ),
        f"--world-size 4 --global-batch-size 8 --data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 2 {EXPERTS}",
        "gradient",
        "layers.1.mlp.experts",
        "data",
        ("the sum over the data group is missing",),
    ),
    "results of experts that come back in the order of the experts": Fault(
        (("out.index_copy_(0, self.sorted_assignments, rows)", "out.index_copy_(0, self.sorted_assignments.sort().values, rows)"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS}",
        "forward",
        "layers.0.mlp",
        None,
        ("the output of the MLP",),
    ),
    "probabilities of experts without a gradient": Fault(
        (
            (
                "return routes.sort_by_expert(rows), grad_router_weights, None",
                "return routes.sort_by_expert(rows), torch.zeros_like(grad_router_weights), None",
            ),
        ),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS}",
        "gradient",
        "layers.1.mlp.router.weight",
        None,
        (),
    ),
    "balance of a tensor rank's own tokens": Fault(
        (("return all_reduce(counts, self._sequence_group)", "return counts"),),
        f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS}",
        "gradient",
        "mlp.router.weight",
        None,
        (),
    ),
    "a router's gradient that is not summed over the parts of the sequence": Fault(
        (
            (
                "return not self.splits and (sequence_parallel",
                "return 'router' not in self.name and not self.splits and (sequence_parallel",
            ),
        ),
        f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS}",
        "gradient",
        "layers.1.mlp.router.weight",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "losses of balance as many times as there are data ranks": Fault(
        (("total_microbatches = num_microbatches * self.context.data_group.size", "total_microbatches = num_microbatches"),),
        f"--world-size 2 {EXPERTS}",
        "gradient",
        "mlp.router.weight",
        None,
        (),
    ),
    "biases of experts moved by a rank's own counts": Fault(
        (
            (
                "totals = all_reduce(self.totals, world)",
                "own = self.totals.clone()\n        totals = all_reduce(self.totals, world)",
            ),
            (
                "self._assignment_counts, moe_totals = totals[:, :-3], totals.index_select(0, self._moe_layer_rows)",
                "self._assignment_counts, moe_totals = own[:, :-3], totals.index_select(0, self._moe_layer_rows)",
            ),
        ),
        f"--world-size 2 {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "gradient",
        "mlp.router.bias",
        "data",
        ("the data ranks hold different values",),
    ),
    "padding that counts in the balance": Fault(
        (("token_terms = token_terms * (is_data * scale)", "token_terms = token_terms * scale"),),
        f"--world-size 2 {EXPERTS} --whole-documents --reset-attention-mask",
        "gradient",
        "mlp.router.weight",
        None,
        (),
    ),
    "padding that takes the places of tokens": Fault(
        (
            (
                "expert_ids = expert_ids.where(data_tokens.is_data.unsqueeze(-1), self.spec.num_experts)",
                "expert_ids = expert_ids.where(expert_ids >= 0, self.spec.num_experts)",
            ),
        ),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS} --moe-expert-capacity-factor 1 --whole-documents "
        "--reset-attention-mask",
        "forward",
        "layers.0.mlp",
        None,
        ("the output of the MLP",),
    ),
    "the residual of tokens that all their experts have dropped": Fault(
        (("y = y.view_as(x)", "y = y.view_as(x) - x * (expert_ids == self.router.spec.num_experts).all(-1, keepdim=True)"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax "
        "--moe-expert-capacity-factor 1",
        "forward",
        "layers.0.mlp",
        None,
        ("the output of the MLP",),
    ),
    "rows that pad experts in a norm": Fault(
        (
            (
                "return apply_experts(padded_rows, [capacity] * len(rows_per_expert))",
                "return torch.nn.functional.normalize(apply_experts(padded_rows, [capacity] * len(rows_per_expert)), dim=0)",
            ),
        ),
        f"--world-size 2 {EXPERTS} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
        "forward",
        "layers.0.mlp",
        None,
        ("the output of the MLP",),
    ),
    "a dropout mask that context ranks repeat": Fault(
        (("context_rank=self.splitter.group.rank)", "context_rank=0)"),),
        "--context-parallel-size 2",
        "dropout mask",
        "embedding",
        "context",
        ("is repeated on ranks 0 and 1 of a context group", "for different tokens or channels"),
        stages=(),
    ),
    "a dropout mask that tensor ranks repeat for their parts of the sequence": Fault(
        (("self.sequence_parallel_rank = scope.tp.rank if scope.sequence_parallel else 0", "self.sequence_parallel_rank = 0"),),
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "dropout mask",
        "layers.0.attention_output",
        "tensor",
        ("is repeated on ranks 0 and 1 of a tensor group",),
        stages=(),
    ),
    "dropout masks of a step for all microbatches": Fault(
        (("return DropoutKey(self.seed, consumed, sample, ", "return DropoutKey(self.seed, consumed, consumed, "),),
        "--world-size 2 --global-batch-size 8",
        "dropout mask",
        "embedding",
        None,
        ("for another layer, site or microbatch",),
        stages=(),
    ),
    "an evaluation that reads its first batch again": Fault(
        (
            (
                "return self.iter_batches(\n            source,\n            global_batch_size_at=lambda _: global_batch_size,",
                "return (batch for _ in range(num_batches) for batch in self.iter_batches(\n            source,\n"
                "            global_batch_size_at=lambda _: global_batch_size,",
            ),
            (
                "            total_samples=global_batch_size * num_batches,\n            num_workers=num_workers,\n"
                "            has_dropout=False,\n        )",
                "            total_samples=global_batch_size,\n            num_workers=num_workers,\n"
                "            has_dropout=False,\n        ))",
            ),
        ),
        "--world-size 2",
        "evaluation",
        "the held-out batches",
        None,
        ("though training with the same weights agrees", "the batches, their masks or their number are wrong"),
        step=0,
    ),
    "the mask ignored in the count": Fault(
        (("total += inputs.loss_mask.sum()", "total += inputs.loss_mask.numel()"),),
        "--tensor-model-parallel-size 2",
        "token count",
        "the global batch",
        None,
        ("the count of tokens ignores the loss mask",),
    ),
    "a chunk of the loss that takes the first chunk's labels in backward": Fault(
        (
            (
                "write_logit_grads(chunk_logits, shard, grad_terms.select(chunk))",
                "write_logit_grads(chunk_logits, shard, grad_terms.select(slice(len(chunk_logits)))"
                "._replace(softmax_factor=grad_terms.select(chunk).softmax_factor))",
            ),
        ),
        "--world-size 2 --loss-chunk-tokens 24",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "a z-loss that counts once for each tensor rank": Fault(
        (("(1.0 + 2.0 * z_coeff * log_z", "(1.0 + 2.0 * self._shard.group.size * z_coeff * log_z"),),
        "--tensor-model-parallel-size 2 --z-loss-coeff 1e-4",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "labels smoothed over the columns of a rank": Fault(
        (("smoothing / self._shard.vocab_size", "smoothing / self._shard.num_valid"),),
        "--tensor-model-parallel-size 2 --label-smoothing 0.1",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "a depth that takes the token before its own": Fault(
        (("policy.run(forward, x, self.word(tokens),", "policy.run(forward, x, self.word(tokens.roll(1, 0)),"),),
        "--pipeline-model-parallel-size 2 --mtp-num-layers 2",
        "forward",
        "mtp.0.projection (stage 1)",
        None,
        ("the output of the norms and the projection of the MTP layer differs, although all earlier outputs agree",),
    ),
    "a depth whose layer rotates by the positions of the one before": Fault(
        (
            (
                "    return forward(inputs, rotary, x, embeddings)",
                "    return forward(inputs, rotary.roll(depth.layer.layer % 2, 0), x, embeddings)",
            ),
        ),
        "--world-size 2 --mtp-num-layers 2 --position-embedding-type rope",
        "forward",
        "mtp.1.layer.attention",
        None,
        ("the output of attention differs, although all earlier outputs agree",),
    ),
    "experts of a depth whose balance nobody minimises": Fault(
        (
            (
                "in self.all_blocks:\n            if block.has_experts",
                "in self.blocks:\n            if block.has_experts",
            ),
        ),
        f"--pipeline-model-parallel-size 2 --mtp-num-layers 1 {EXPERTS}",
        "gradient",
        "mtp.0.layer.mlp.router.weight",
        None,
        (),
    ),
    "labels of a depth one too few ahead": Fault(
        (("functional.pad(labels[1:], (0, 0, 0, 1))", "functional.pad(labels[1:], (0, 0, 1, 0))"),),
        "--world-size 2 --mtp-num-layers 1",
        "gradient",
        "mtp.0.layer.mlp.down.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "an embedding of two stages whose halves are not added": Fault(
        (("entry.record.tied and entry.is_shared_across_stages", "entry.record.tied and len(entry.owners) > 1"),),
        "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights",
        "gradient",
        "embedding.word.weight",
        "pipeline",
        (),
    ),
    "gradients that are not clipped": Fault(
        (
            (
                "clip_factor = min(1.0, self._clip_grad / (grad_norm + 1e-6)) if self._clip_grad > 0.0 else 1.0",
                "clip_factor = 1.0",
            ),
        ),
        "--world-size 2",
        "update",
        "embedding.word.weight",
        None,
        ("the gradient is right, the update is not",),
    ),
    "a host buffer that is filled again before it was read": Fault(
        (
            (
                "buffer = self._free_buffers[size].pop() if self._free_buffers[size] else self._allocate_buffer(size)",
                "buffer = self._free_buffers[size][-1] if self._free_buffers[size] else self._allocate_buffer(size)",
            ),
        ),
        "--cpu-offload-activations",
        "gradient",
        "layers.0.mlp.up.bias",
        None,
        ("differs by no constant factor",),
    ),
    "layers that run again in another order": Fault(
        (
            (
                "for block, rotary in zip(self.blocks, self.rotaries, strict=True):",
                "for block, rotary in zip(self.blocks[::-1] if is_recompute else self.blocks, self.rotaries, strict=True):",
            ),
        ),
        "--recompute-granularity full --recompute-num-layers 2",
        "gradient",
        "layers.1.mlp.down.weight",
        None,
        ("differs by no constant factor",),
    ),
    "a norm's input in the place of its result": Fault(
        (("x = recompute_input(saved_input) if pending_x is None", "x = saved_input if pending_x is None"),),
        "--recompute-activations --recompute-modules layernorm",
        "gradient",
        "layers.1.mlp.up.weight",
        None,
        ("differs by no constant factor",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    assert_found(FAULTS[name], tmp_path)


def test_without_a_fault_all_is_equal(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --position-embedding-type rope"
    status, text, found = verify(tmp_path, (), flags, "--steps", "2")
    assert status == 0 and text.startswith("EQUAL"), text
    assert found["equal"] and found["runs"][0]["largest"]["relative"] <= 1e-10
