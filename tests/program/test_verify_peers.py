"""Faults of other systems' mixtures of experts that their users reported, planted here: each is found, and its place is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.planted import EXPERTS, Fault, assert_found

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERT = "--world-size 2 --expert-model-parallel-size 2"
ROUTER, FORWARD = "mlp.router.weight", "layers.0.mlp (layer 0)"
_LOCAL_TOKENS = ((".numel() * self._sequence_group.size", ".numel()"),)


@dataclass(frozen=True)
class Report:
    """What users reported."""

    title: str
    address: str
    cause: str
    fault: Fault
    """The same mistake here."""


REPORTS = (
    Report(
        "Wrong-size gradients in Expert Parallel MoE",
        "github.com/pytorch/pytorch/issues/160285; DeepSpeed 5618 and megablocks 86 are alike",
        "Gradients of experts are EP times too large: their ranks see the tokens of EP data ranks, and the mean is over fewer.",
        Fault(
            (
                (
                    "compute_weight_product(grad_output[rows], x[rows], matrix",
                    "compute_weight_product(2 * grad_output[rows], x[rows], matrix",
                ),
            ),
            f"{EXPERT} {EXPERTS}",
            "gradient",
            "layers.1.mlp.experts",
            "data",
            ("2.0x", "counted twice"),
        ),
    ),
    Report(
        "Gradient-norm undercounting when using EP and TP (EP = 1 and ETP other than TP: not reduced over the copies)",
        "github.com/NVIDIA/Megatron-LM/pull/5916, the second of its faults",
        "With other ETP than TP, gradients of experts are summed over the data ranks of dense layers.",
        Fault(
            (("        return EXPERT_AXES[-1:]\n", "        return GRADIENT_AXES\n"),),
            f"{TENSOR} --expert-tensor-parallel-size 1 {EXPERTS}",
            "gradient",
            "layers.1.mlp.experts",
            "tensor",
            ("is missing",),
        ),
    ),
    Report(
        "Gradient-norm undercounting when using EP and TP",
        "github.com/NVIDIA/Megatron-LM/pull/5916; DeepSpeed 8475, ColossalAI 2192 and Automodel 3816 are alike",
        "The norm that clips takes the experts of some ranks for copies of others', so it lacks them.",
        Fault(
            (('(EXPERT_AXES[:2] if self.is_expert else ("tp",))', '("tp", "ep")'),),
            f"{TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {EXPERTS}",
            "gradient norm",
            "embedding.word.weight",
            None,
            ("what it should be",),
        ),
    ),
    Report(
        "Fix aux loss scale when cp enabled",
        "github.com/NVIDIA/Megatron-LM/pull/2217",
        "The balancing loss of a sequence that context ranks share is divided by the tokens of one of them.",
        Fault(_LOCAL_TOKENS, f"--context-parallel-size 2 {EXPERTS}", "gradient", ROUTER, None, ()),
    ),
    Report(
        "Fix MoE aux_loss / z_loss gradient scaling with TP > 1",
        "github.com/NVIDIA/Megatron-LM/pull/5047",
        "The z-loss of routers is as many times too large as there are tensor ranks.",
        Fault(
            _LOCAL_TOKENS,
            f"{TENSOR} --num-experts 4 --disable-bias-linear --moe-z-loss-coeff 0.5 --moe-router-load-balancing-type none",
            "gradient",
            ROUTER,
            None,
            (),
        ),
    ),
    Report(
        "Normalize MoE auxiliary loss during gradient accumulation",
        "github.com/NVIDIA-NeMo/Automodel/pull/3359",
        "Each microbatch adds its whole auxiliary loss, so that it weighs as many times as there are microbatches.",
        Fault(
            (
                (
                    "total_microbatches = num_microbatches * self.context.data_group.size",
                    "total_microbatches = self.context.data_group.size",
                ),
            ),
            f"--world-size 2 --global-batch-size 8 {EXPERTS}",
            "gradient",
            ROUTER,
            None,
            (),
        ),
    ),
    Report(
        "Fix for sequence-level aux MoE loss being dependent on batch size",
        "github.com/NVIDIA/Megatron-LM/pull/5798",
        "The loss of sequences is divided by their number in a microbatch once too often.",
        Fault(
            (
                (
                    "assignment_fractions = assignment_counts * len(assignment_counts) / (",
                    "assignment_fractions = assignment_counts / (",
                ),
            ),
            f"--world-size 2 {EXPERTS} --moe-router-load-balancing-type seq_aux_loss",
            "gradient",
            ROUTER,
            None,
            (),
        ),
    ),
    Report(
        "Double softmax in MoE router load-balancing loss",
        "github.com/huggingface/transformers/issues/45120",
        "The balancing loss takes the softmax of probabilities, so that its gradient is nearly nothing.",
        Fault(
            (("        return logits.softmax(-1)\n", "        return logits.softmax(-1).softmax(-1)\n"),),
            f"--world-size 2 {EXPERTS}",
            "gradient",
            ROUTER,
            None,
            (),
        ),
    ),
    Report(
        "Scores mask for moe topk (groups that are closed are masked with 0)",
        "github.com/sgl-project/sglang/pull/3705; DeepSeek-V3 741, vllm 13474",
        "Experts of closed groups score 0, and so more than those of open groups with negative scores.",
        Fault(
            (("~_is_in_selected_group(scores, spec), -torch.inf", "~_is_in_selected_group(scores, spec), 0.0"),),
            f"--world-size 2 {EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1",
            "forward",
            FORWARD,
            None,
            ("the output of the MLP differs, although all earlier outputs agree",),
        ),
    ),
    Report(
        "Fix Router topk_weight in noaux_tc Method",
        "github.com/PaddlePaddle/PaddleFleet/pull/329",
        "Results of experts are weighted by scores with the bias that is for choosing alone.",
        Fault(
            (
                (
                    "compute_router_weights(logits, scores, expert_ids, self.spec)",
                    "compute_router_weights(logits, scores - scores.detach() + selection_scores, expert_ids, self.spec)",
                ),
            ),
            f"--world-size 2 {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "forward",
            FORWARD,
            None,
            ("the output of the MLP differs, although all earlier outputs agree",),
        ),
    ),
    Report(
        "Fix GroupedExperts convergence gap with expert parallelism",
        "github.com/NVIDIA-NeMo/Automodel/pull/1260; transformers 48205 is alike",
        "The gradients of gathered tokens are not summed over the ranks whose experts they pass.",
        Fault(
            (
                (
                    "x, router_weights = all_gather_forward(x, self.group),",
                    "parts = enumerate(all_gather(x.detach(), self.group).chunk(self.group.size))\n"
                    "        x, router_weights = torch.cat([x if i == self.group.rank else part for i, part in parts]),",
                ),
            ),
            f"{EXPERT} --moe-token-dispatcher-type allgather {EXPERTS}",
            "gradient",
            "layers.1.mlp_norm.bias",
            None,
            ("differs by no constant factor",),
        ),
    ),
    Report(
        "Defensively use torch.zeros to avoid NaNs in case an expert isn't assigned any tokens",
        "github.com/vllm-project/vllm/pull/39645; transformers 48205 is alike",
        "Rows that nobody writes keep what was in memory, and are added to tokens.",
        Fault(
            (("else rows.new_zeros(shape)", "else rows.new_ones(shape)"),),
            f"{EXPERT} {EXPERTS} --moe-expert-capacity-factor 1",
            "forward",
            FORWARD,
            None,
            ("the output of the MLP differs, although all earlier outputs agree",),
        ),
    ),
    Report(
        "Preserve top-k routing under full AC",
        "github.com/NVIDIA-NeMo/Automodel/pull/3140; Automodel 2635 and 3325, Megatron-LM 1330",
        "A forward that runs again chooses again, and among equal scores otherwise.",
        Fault(
            (
                (
                    "expert_ids = reuse_in_recompute(lambda: select_experts(selection_scores, self.spec))",
                    "times = reuse_in_recompute(list)  # the same list again\n"
                    "        times.append(1)\n"
                    "        expert_ids = select_experts(selection_scores.roll(len(times) - 1, -1), self.spec)",
                ),
            ),
            f"--world-size 2 --recompute-granularity full {EXPERTS}",
            "gradient",
            "layers.1.mlp.experts",
            None,
            ("differs by no constant factor",),
        ),
    ),
    Report(
        "Init expert (each worker shared the same seed)",
        "github.com/laekov/fastmoe/pull/4; torchtitan 1363 names the other side, values that depend on EP",
        "Every rank draws the first values for its own experts, so all ranks hold the same ones.",
        Fault(
            (
                (
                    "target_rows = target_rows[tensor_slice.index[:-1]]",
                    "target_rows = target_rows[tuple(slice(0, size) for size in tensor_slice.sizes[:-1])]",
                ),
            ),
            f"{EXPERT} {EXPERTS}",
            "initial weights",
            "layers.0.mlp.experts.up.weight (layer 0)",
            None,
            ("initialization depends on the layout",),
            step=0,
        ),
    ),
)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.title)
def test_what_users_reported_elsewhere_is_found_here(report: Report, tmp_path: Path) -> None:
    assert_found(report.fault, tmp_path)
