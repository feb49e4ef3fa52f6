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
        (("ranks[first - step]", "ranks[step - 1]"),),
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("what the attention gives differs, though all before it agrees",),
    ),
    "scales of a rank's own numbers": Fault(
        (("if not any(shared):", "if True:"),),
        "--tensor-model-parallel-size 2 --bf16 --fp8-format hybrid",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("what the attention gives differs, though all before it agrees",),
    ),
    "an input in 8 bits that is turned round without new scales": Fault(
        (
            (
                "        scaled_product_into(into, a, b, add=add)\n",
                "        turned = quantised(x, magnitudes(x, self._of_tokens), self._of_tokens, E4M3).decoded()\n"
                "        _ = (into.add_ if add else into.copy_)(a.decoded() @ turned)\n",
            ),
        ),
        "--bf16 --fp8-format hybrid --fp8-recipe rowwise",
        "gradient",
        "layers.1.mlp.down.weight (layer 1)",
        None,
        ("differs by no constant factor", "likewise layers.1.mlp.up.weight"),
    ),
    "adapters whose low channels are not summed over tensor ranks": Fault(
        (("same if splits_inputs else plain)", "plain)"),),
        "--tensor-model-parallel-size 2 --lora-rank 2",
        "forward",
        "layers.0.attention (layer 0)",
        "tensor",
        ("what the attention gives differs, though all before it agrees",),
    ),
    "divided twice by the data size": Fault(
        (
            (
                "self.scaler.scale / pending.wait().clamp(min=1.0)",
                "self.scaler.scale / pending.wait().clamp(min=1.0) / self.context.data_group.size",
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
        ("the tied embedding is not joined",),
        stages=(0, 1),
    ),
    "a group's factor applied to its neighbour": Fault(
        (
            (
                "                group_of(shard.record),\n",
                "                group_of(shards[span.index - 1].record),\n",
            ),
        ),
        "--world-size 2 --param-groups '*.mlp.up.weight lr-mult=0.25'",
        "update",
        "layers.0.attention.output.weight (layer 0)",
        None,
        ("the change is 0.25x what it should be", "likewise layers.1.attention.output.weight"),
    ),
    "sums over the rows of a slice for those of the matrix": Fault(
        (("all_reduce(buffer.numbers, group, buffer.op)", 'all_reduce(buffer.numbers, self._context.group("tp"), buffer.op)'),),
        "--world-size 2 --use-distributed-optimizer --optimizer adafactor --disable-bias-linear --ddp-bucket-size 2000",
        "update",
        "embedding.word.weight",
        None,
        ("the gradient is right, the update is not",),
    ),
    "a matrix orthogonalised without the rows of another rank": Fault(
        (
            (
                "arrived.append((box_of(self.whole, move, number), part))",
                "arrived.append((box_of(self.whole, move, number), part if move.sender == place else torch.zeros_like(part)))",
            ),
        ),
        "--tensor-model-parallel-size 2 --optimizer muon --muon-momentum 0.5",
        "update",
        "layers.0.attention.qkv.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
    ),
    "scores clipped by what one data rank has seen": Fault(
        (("all_reduce(self.model.largest.found, self.context.world, dist.ReduceOp.MAX)", "self.model.largest.found"),),
        "--world-size 2 --qk-clip --qk-clip-threshold 1e-4",
        "update",
        "layers.0.attention.qkv.weight (layer 0)",
        "data",
        ("the gradient is right, the update is not",),
    ),
    "momentum of another slice": Fault(
        (("given[inside.start : inside.stop]", "given[: inside.stop - inside.start]"),),
        "--world-size 2 --use-distributed-optimizer --optimizer muon --swiglu",
        "update",
        "layers.0.mlp.up.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
    ),
    "blocks of 8 bits that begin where a slice does": Fault(
        (("head = min(length, -first % self.size)", "head = 0"),),
        "--world-size 3 --global-batch-size 6 --use-distributed-optimizer --optimizer adam8bit",
        "update",
        "layers.0.mlp.down.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
        step=2,
    ),
    "blocks of 8 bits with a scale on each tensor rank": Fault(
        (("largest = moment.abs().amax(-1) if self.shared is None", "largest = moment.abs().amax(-1) if True"),),
        "--world-size 2 --tensor-model-parallel-size 2 --optimizer adam8bit",
        "update",
        "layers.0.attention.output.weight (layer 0)",
        None,
        ("the gradient is right, the update is not",),
        step=2,
    ),
    "places in a sample of another context rank": Fault(
        (("self.cutting.of_samples.places(self.cutting.group.index))", "self.cutting.of_samples.places(0))"),),
        "--world-size 4 --context-parallel-size 2",
        "forward",
        "embedding",
        None,
        ("positions 4 to 11 differ, the others agree; only on context rank 1",),
    ),
    "the halves of a context rank swapped": Fault(
        (
            (
                "        places = cut.places(self.group.index)\n",
                "        places = np.roll(cut.places(self.group.index), cut.piece)\n",
            ),
        ),
        "--world-size 2 --context-parallel-size 2",
        "forward",
        "embedding",
        None,
        ("what the embedding gives differs",),
    ),
    "bounds of documents lost where context ranks cut": Fault(
        (
            (
                "self.documents if self.documents.bounded else None",
                "self.documents if self.documents.bounded and self.queries == self.keys else None",
            ),
        ),
        "--world-size 2 --context-parallel-size 2 --reset-attention-mask",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("what the attention gives differs, though all before it agrees", "the scale or the mask"),
    ),
    "parts of attention added as if their sums were one": Fault(
        (("out.mul_(old).addcmul_(found, new)", "out.add_(found)"),),
        "--world-size 2 --context-parallel-size 2 --cp-comm-type p2p",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("positions 4 to 15 differ, the others agree",),
    ),
    "gradients of keys that are not added on their way round": Fault(
        (("                summed += pending.wait()\n", "                pending.wait()\n"),),
        "--world-size 2 --context-parallel-size 2 --cp-comm-type p2p",
        "gradient",
        "layers.1.attention.qkv.bias (layer 1)",
        None,
        ("16 rows from 4 on of 24",),
    ),
    "gradients summed over data ranks alone": Fault(
        (
            (
                "weight.partial_over_tp(sequence_parallel) else GRADIENT_AXES",
                "weight.partial_over_tp(sequence_parallel) else ('dp',)",
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
                "Chunk(index, len(places), stage, range(stop - count, stop))",
                "Chunk(index, len(places), stage, range(stop - count, stop - index))",
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
                '        self.stage = scope.context.group("pp").index\n        self.qkv = ',
            ),
            (
                "q, k, v = split(qkv, None if normed else rotary, self.interleaved)",
                "q, k, v = split(qkv, rotary.roll(1, 0) if self.stage == 2 else rotary, self.interleaved)",
            ),
        ),
        "--pipeline-model-parallel-size 4 --position-embedding-type rope",
        "forward",
        "layers.2.attention (layer 2, stage 2)",
        None,
        ("what the attention gives differs, though all before it agrees", "the first token of a sample", "rotary positions"),
        stages=(2,),
    ),
    "a window that is one token too short": Fault(
        (("hidden |= keys_at < at - self.window", "hidden |= keys_at <= at - self.window"),),
        "--pipeline-model-parallel-size 2 --window-size 9,0 --window-attn-skip-freq [0,0,1,0]",
        "forward",
        "layers.2.attention (layer 2, stage 1)",
        None,
        ("what the attention gives differs, though all before it agrees",),
        stages=(1,),
    ),
    "the rotary base of the other kind of layer": Fault(
        (("x = run(x, tables[rotary],", "x = run(x, tables[next(iter(tables))],"),),
        "--position-embedding-type rope --window-size 9,0 --window-attn-skip-freq 2 --rotary-base-local 100",
        "forward",
        "layers.1.attention (layer 1)",
        None,
        ("what the attention gives differs, though all before it agrees",),
    ),
    "a capped logit without the slope of its cap": Fault(
        (("part.copy_(wide.mul_(slope))", "part.copy_(wide)"),),
        "--tensor-model-parallel-size 2 --final-logit-softcapping 0.3 --loss-chunk-tokens 4",
        "gradient",
        "final_norm.bias",
        None,
        ("differs by no constant factor", "so are the gradients of all parameters"),
    ),
    "a norm behind a layer whose gradient is of a part of the sequence": Fault(
        (("(sequence_parallel or self.on_own_heads)", '(sequence_parallel and "_post_" not in self.name or self.on_own_heads)'),),
        "--tensor-model-parallel-size 2 --sequence-parallel --norm-placement sandwich",
        "gradient",
        "layers.1.mlp_post_norm.bias",
        "tensor",
        ("the sum over the tensor group is missing",),
    ),
    "a sink that the softmax forgets": Fault(
        (("total += (sink - highest).exp_()", "total += 0 * (sink - highest)"),),
        "--tensor-model-parallel-size 2 --softmax-type learnable",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("what the attention gives differs, though all before it agrees",),
    ),
    "a mean square over a rank's own heads": Fault(
        (("in zip(all_reduce(squares, group), sizes, strict=True)", "in zip(squares, sizes, strict=True)"),),
        "--tensor-model-parallel-size 2 --normalization RMSNorm --qk-layernorm --qk-layernorm-all-heads",
        "forward",
        "layers.0.attention (layer 0)",
        None,
        ("what the attention gives differs, though all before it agrees",),
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
        (("k[..., plain:] = shared", "k[..., plain:] = shared.roll(1, 1)"),),
        f"--pipeline-model-parallel-size 2 {LATENT}",
        "forward",
        "layers.0.attention (layer 0, stage 0)",
        None,
        ("what the attention gives differs, though all before it agrees",),
    ),
    "a bucket reduced before its last gradient": Fault(
        (
            (
                "if self._early and microbatches == self._microbatches:",
                "if self._early and microbatches == self._microbatches - 1:",
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
                "unit.register_forward_pre_hook(partial(_finish_publishing, needed))",
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
        ("what arrived from stage 0 may be wrong too",),
        stages=(1,),
    ),
    "a buffer used again while it is reduced": Fault(
        (
            (
                "self._pool.give_back(self._borrowed, pending.wait)",
                "self._pool.give_back(self._borrowed, lambda: None)",
            ),
        ),
        "--world-size 2 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --ddp-bucket-size 2000",
        "transfer",
        "the input of a reduce-scatter of",
        None,
        ("elements over ranks 0, 1", "it was written to before it had left"),
    ),
    "gradients that are reduced once, without the first microbatches": Fault(
        (
            (
                "(self._microbatches if once else 1)):\n            return",
                "(self._microbatches if once else 1)):\n            self._sinks[number].written = False\n            return",
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
                "            num_workers=num_workers,\n            dropout=False,\n",
                "            num_workers=num_workers,\n            dropout=True,\n",
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
        (("if replica.process_group is None:", "if replica.process_group is None or axes[0] in ('etp', 'ep', 'edp'):"),),
        f"--world-size 4 --global-batch-size 8 --data-parallel-sharding-strategy optim_grads_params --fsdp-shard-size 2 {EXPERTS}",
        "gradient",
        "layers.1.mlp.experts",
        "data",
        ("the sum over the data group is missing",),
    ),
    "results of experts that come back in the order of the experts": Fault(
        (("found.index_copy_(0, self.order, rows)", "found.index_copy_(0, self.order.sort().values, rows)"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS}",
        "forward",
        "layers.0.mlp",
        None,
        ("what the MLP gives",),
    ),
    "probabilities of experts without a gradient": Fault(
        (("return way.by_expert(rows), grad_weights, None", "return way.by_expert(rows), torch.zeros_like(grad_weights), None"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS}",
        "gradient",
        "layers.1.mlp.router.weight",
        None,
        (),
    ),
    "balance of a tensor rank's own tokens": Fault(
        (("return all_reduce(counts, self._sequence_ranks)", "return counts"),),
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
        (("everywhere = microbatches * self.context.data_group.size", "everywhere = microbatches"),),
        f"--world-size 2 {EXPERTS}",
        "gradient",
        "mlp.router.weight",
        None,
        (),
    ),
    "biases of experts moved by a rank's own counts": Fault(
        (
            ("whole = all_reduce(self.found, world)", "own = self.found.clone()\n        whole = all_reduce(self.found, world)"),
            (
                "self._counts, found = whole[:, :-3], whole.index_select(0, self._rows)",
                "self._counts, found = own[:, :-3], whole.index_select(0, self._rows)",
            ),
        ),
        f"--world-size 2 {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "gradient",
        "mlp.router.bias",
        "data",
        ("the data ranks hold different values",),
    ),
    "the residual of tokens that all their experts have dropped": Fault(
        (("y = y.view_as(x)", "y = y.view_as(x) - x * (chosen == self.router.spec.experts).all(-1, keepdim=True)"),),
        f"--world-size 2 --expert-model-parallel-size 2 {EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax "
        "--moe-expert-capacity-factor 1",
        "forward",
        "layers.0.mlp",
        None,
        ("what the MLP gives",),
    ),
    "rows that pad experts in a norm": Fault(
        (
            (
                "return apply(filled, [most] * len(counts))",
                "return torch.nn.functional.normalize(apply(filled, [most] * len(counts)), dim=0)",
            ),
        ),
        f"--world-size 2 {EXPERTS} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
        "forward",
        "layers.0.mlp",
        None,
        ("what the MLP gives",),
    ),
    "a dropout mask that context ranks repeat": Fault(
        (("context_rank=self.cutting.group.index)", "context_rank=0)"),),
        "--context-parallel-size 2",
        "dropout mask",
        "embedding",
        "context",
        ("is repeated on ranks 0 and 1 of a context group", "for different tokens or channels"),
        stages=(),
    ),
    "a dropout mask that tensor ranks repeat for their parts of the sequence": Fault(
        (("self.coordinate = scope.tp.index if scope.sequence_parallel else 0", "self.coordinate = 0"),),
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "dropout mask",
        "layers.0.attention_output",
        "tensor",
        ("is repeated on ranks 0 and 1 of a tensor group",),
        stages=(),
    ),
    "dropout masks of a step for all microbatches": Fault(
        (("return DropoutKey(self.seed, consumed, first_sample, ", "return DropoutKey(self.seed, consumed, consumed, "),),
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
                "return self.steps(\n            source,\n            global_batch_size_at=lambda _: global_batch_size,",
                "return (batch for _ in range(num_batches) for batch in self.steps(\n            source,\n"
                "            global_batch_size_at=lambda _: global_batch_size,",
            ),
            (
                "            total_samples=global_batch_size * num_batches,\n            num_workers=num_workers,\n"
                "            dropout=False,\n        )",
                "            total_samples=global_batch_size,\n            num_workers=num_workers,\n"
                "            dropout=False,\n        ))",
            ),
        ),
        "--world-size 2",
        "evaluation",
        "the held-out batches",
        None,
        ("though training with the same weights agrees", "the batches, their masks or their count"),
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
                "write_gradient(part, columns, of_rows.at(place))",
                "write_gradient(part, columns, of_rows.at(slice(len(part)))._replace(factor=of_rows.at(place).factor))",
            ),
        ),
        "--world-size 2 --loss-chunk-tokens 24",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "a z-loss that counts once for each tensor rank": Fault(
        (("(1.0 + 2.0 * z_coeff * log_z", "(1.0 + 2.0 * self._columns.group.size * z_coeff * log_z"),),
        "--tensor-model-parallel-size 2 --z-loss-coeff 1e-4",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "labels smoothed over the columns of a rank": Fault(
        (("smoothing / self._columns.vocab_size", "smoothing / self._columns.num_valid"),),
        "--tensor-model-parallel-size 2 --label-smoothing 0.1",
        "gradient",
        "final_norm.bias",
        None,
        ("so are the gradients of all parameters",),
    ),
    "a depth that takes the token before its own": Fault(
        (("treatment.run(forward, x, self.word(tokens),", "treatment.run(forward, x, self.word(tokens.roll(1, 0)),"),),
        "--pipeline-model-parallel-size 2 --mtp-num-layers 2",
        "forward",
        "mtp.0.projection (stage 1)",
        None,
        ("what the norms and the projection of the depth give differs, though all before it agrees",),
    ),
    "a depth whose layer rotates by the positions of the one before": Fault(
        (
            (
                "    return run(inputs, rotary, x, embedded)",
                "    return run(inputs, rotary.roll(depth.layer.layer % 2, 0), x, embedded)",
            ),
        ),
        "--world-size 2 --mtp-num-layers 2 --position-embedding-type rope",
        "forward",
        "mtp.1.layer.attention",
        None,
        ("what the attention gives differs, though all before it agrees",),
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
        (("entry.record.tied and entry.held_elsewhere", "entry.record.tied and len(entry.holders) > 1"),),
        "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights",
        "gradient",
        "embedding.word.weight",
        "pipeline",
        (),
    ),
    "gradients that are not clipped": Fault(
        (
            (
                "clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0.0 else 1.0",
                "clip = 1.0",
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
                "buffer = self._free[size].pop() if self._free[size] else self._make(size)",
                "buffer = self._free[size][-1] if self._free[size] else self._make(size)",
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
                "for block, rotary in zip(self.blocks[::-1] if again else self.blocks, self.rotaries, strict=True):",
            ),
        ),
        "--recompute-granularity full --recompute-num-layers 2",
        "gradient",
        "layers.1.mlp.down.weight",
        None,
        ("differs by no constant factor",),
    ),
    "a norm's input in the place of its result": Fault(
        (("x = make(kept) if whole_x is None", "x = kept if whole_x is None"),),
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
