"""A plan as JSON: sizes in bytes, shares from 0 to 1."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from megatron.data_parallel.state_layout import Bytes
from megatron.planner.plan import Kind, Plan, Traffic


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Everything of the plan, in types that JSON has."""
    fullest = plan.kinds[plan.fullest]
    return {
        "job": asdict(plan.job),
        "device_bytes": fullest.memory.total.device,
        "host_bytes": max(kind.memory.total.host for kind in plan.kinds),
        "fullest": plan.fullest,
        "model": {"parameters": plan.parameters, "parameters_by_stage": list(plan.parameters_by_stage)},
        "tokens_per_step": plan.work.tokens,
        "flops": {
            "per_token": plan.work.flops_per_token,
            "per_step": plan.work.flops,
            "per_rank": plan.work.flops_per_rank(plan.job.world_size),
        },
        "pipeline": {"bubble_share": plan.work.bubble},
        "links": _links(max(plan.kinds, key=lambda kind: kind.inside_bytes + kind.between_bytes)),
        "layers": [
            {
                "chunk": chunk.index,
                "stage": chunk.stage,
                "first_layer": chunk.layers.start if len(chunk.layers) else None,
                "num_layers": len(chunk.layers),
                "embedding": chunk.first,
                "loss": chunk.last,
            }
            for chunk in plan.layers
        ],
        "kinds": [_kind(kind) for kind in plan.kinds],
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def write_plan(plan: Plan, path: str) -> None:
    """Write it to a file, for which folders are made where they are missing.

    Raises:
        ValueError: that is not possible.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w") as file:
            json.dump(plan_to_json(plan), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise ValueError(f"--dry-run-json {path} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def _kind(kind: Kind) -> dict[str, Any]:
    return {
        "stages": list(kind.stages),
        "tensor": sorted({places.tensor for places in kind.places}),
        "places": [{"tensor": at.tensor, "data": [at.data.start, at.data.stop]} for at in kind.places],
        "ranks": kind.ranks,
        "first_rank": kind.first_rank,
        "parameters": kind.parameters,
        "memory": {part.name: _bytes(getattr(kind.memory, part.name)) for part in fields(kind.memory)},
        "device_bytes": kind.memory.total.device,
        "host_bytes": kind.memory.total.host,
        "sent": [_traffic(one) for one in kind.sent],
        "links": _links(kind),
    }


def _bytes(amount: Bytes) -> dict[str, int]:
    return asdict(amount)


def _traffic(one: Traffic) -> dict[str, Any]:
    return asdict(one)


def _links(kind: Kind) -> dict[str, float]:
    return {"inside_bytes": kind.inside_bytes, "between_bytes": kind.between_bytes}
