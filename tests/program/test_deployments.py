"""Dockerfile, Kubernetes and SkyPilot files: what is copied is enough, fields are known, commands are accepted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.cli import load
from megatron.config.training import TrainingConfig
from megatron.training.signals import EXIT_DIVERGED, EXIT_REFUSED
from megatron_lab.resilience.command import parse_command_line
from tests.support.cli import ROOT

_INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
_NAMED = {"name": None, "value": None, "valueFrom": {"fieldRef": {"fieldPath": None}}}
_POD: dict[str, Any] = {
    "restartPolicy": None,
    "terminationGracePeriodSeconds": None,
    "containers": {
        **dict.fromkeys(("name", "image", "command", "args")),
        "env": _NAMED,
        "ports": {"containerPort": None},
        "resources": {"requests": dict.fromkeys(("cpu", "memory")), "limits": dict.fromkeys(("memory", "nvidia.com/gpu"))},
        "volumeMounts": {"name": None, "mountPath": None},
    },
    "volumes": {
        "name": None,
        "persistentVolumeClaim": {"claimName": None},
        "emptyDir": {"medium": None, "sizeLimit": None},
    },
}
_RULES = {
    "action": None,
    "onPodConditions": {"type": None, "status": None},
    "onExitCodes": {"containerName": None, "operator": None, "values": None},
}
JOB_SET: dict[str, Any] = {
    **dict.fromkeys(("apiVersion", "kind")),
    "metadata": {"name": None},
    "spec": {
        "network": {"enableDNSHostnames": None},
        "successPolicy": {"operator": None, "targetReplicatedJobs": None},
        "failurePolicy": {"maxRestarts": None, "rules": {"action": None, "onJobFailureReasons": None}},
        "replicatedJobs": {
            "name": None,
            "template": {
                "spec": {
                    **dict.fromkeys(("parallelism", "completions", "completionMode", "backoffLimit")),
                    "podFailurePolicy": {"rules": _RULES},
                    "template": {"spec": _POD},
                }
            },
        },
    },
}
"""Fields of jobset.x-k8s.io/v1alpha2, batch/v1 and v1 that may be used, by the references of Kubernetes and JobSet."""
SKY: dict[str, Any] = {
    **dict.fromkeys(("name", "workdir", "num_nodes", "setup", "run")),
    "resources": {"accelerators": None, "disk_size": None, "job_recovery": {"strategy": None, "max_restarts_on_errors": None}},
    "envs": {"BUCKET": None},
    "file_mounts": {"/data": {"source": None, "mode": None}},
}
"""The same of SkyPilot's task YAML."""


def unknown(found: Any, known: Any, place: str = "") -> list[str]:
    """Fields that are not known, by their paths."""
    if known is None:
        return []
    if isinstance(found, list):
        return [wrong for one in found for wrong in unknown(one, known, place)]
    wrong = [f"{place}.{name}" for name in found if name not in known]
    return wrong + [path for name in found if name in known for path in unknown(found[name], known[name], f"{place}.{name}")]


def accepted(words: Sequence[str], ranks: int) -> Any:
    """The settings of the supervisor, whose program's flags pass all rules for so many ranks."""
    found = parse_command_line(words)
    for size in found.elastic:
        load([*found.flags, "--dry-run", "--world-size", str(size)], 1)
    assert found.elastic[1] == ranks
    return found


def test_the_job_set_restarts_what_the_supervisors_do_not() -> None:
    found = yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())
    assert not unknown(found, JOB_SET) and (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert unknown({"spec": {"replicas": 2}}, JOB_SET) == [".spec.replicas"]
    jobs = {job["name"]: job["template"]["spec"] for job in found["spec"]["replicatedJobs"]}
    assert [*jobs] == ["store", "nodes"] and found["spec"]["successPolicy"]["targetReplicatedJobs"] == ["nodes"]
    (store,) = jobs["store"]["template"]["spec"]["containers"]
    (node,) = jobs["nodes"]["template"]["spec"]["containers"]
    assert (
        store["image"] == node["image"]
        and store["command"][:3] == node["command"][:3] == "python -m megatron_lab.resilience.supervisor".split()
    )
    port = parse_command_line(store["command"][3:]).serve
    assert store["ports"] == [{"containerPort": port}]

    launched = accepted(node["args"], 16 * int(node["resources"]["limits"]["nvidia.com/gpu"]))
    # The name that JobSet gives the first pod of the store's first job: <set>-<job>-0-0.<set>.
    name = found["metadata"]["name"]
    assert launched.meet == (f"{name}-store-0-0.{name}", port) and launched.local_addr == "$(POD_IP)"
    pods = jobs["nodes"]["parallelism"]
    assert pods == jobs["nodes"]["completions"] == launched.nnodes[1] + 1, "one spare"
    assert launched.leave_on_signal and launched.join_at_once

    # A pod that is taken away is no failure; exit codes after which the supervisor starts nothing end the job and the set.
    ignored, ended = jobs["nodes"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    stop_code = load([*launched.flags, "--dry-run", "--world-size", "128"], 1).config.training.exit_signal_code
    assert ended["action"] == "FailJob" and ended["onExitCodes"]["values"] == sorted([EXIT_REFUSED, stop_code, EXIT_DIVERGED])
    assert ended["onExitCodes"]["containerName"] == node["name"] and stop_code == TrainingConfig().exit_signal_code
    assert jobs["nodes"]["template"]["spec"]["restartPolicy"] == "Never", "else Kubernetes refuses a podFailurePolicy"
    assert found["spec"]["failurePolicy"]["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    volumes = {volume["name"] for volume in jobs["nodes"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in node["volumeMounts"]} == volumes


def test_the_sky_task_is_accepted(tmp_path: Path) -> None:
    """Its script as bash reads it on a node of such a cluster, with a program in place of Python that prints its words."""
    found = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    assert not unknown(found, SKY)
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    nodes, gpus = found["num_nodes"], int(found["resources"]["accelerators"].partition(":")[2])
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_TASK_ID": "sky-1",
    }
    script = re.sub(r"^source .*$", "", found["run"], flags=re.MULTILINE)
    environment = {**os.environ, **found["envs"], **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["bash", "-euc", script], env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = told.split()
    assert words[:2] == ["-m", "megatron_lab.resilience.supervisor"]
    launched = accepted(words[2:], nodes * gpus)
    assert launched.meet == ("10.0.0.7", 29500) and launched.run_id == "sky-1"
    for line in found["setup"].splitlines():
        assert line.split()[:2] == ["source", "tools/setup_env.sh"]


def test_the_image_has_what_it_needs(tmp_path: Path, full: bool) -> None:
    """The files that the Dockerfile copies are all that its command needs, and .dockerignore lets them pass. The page's commands
    are rehearsed there with --full; else their settings are valid."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    assert {name for name, _ in steps} <= _INSTRUCTIONS and [name for name, _ in steps][:2] == ["ARG", "FROM"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [words.split() for name, words in steps if name == "COPY"]
    for *sources, target in copied:
        for source in sources:
            assert f"!{source}" in ignored, source
            place = tmp_path / (target if target not in ("./", ".") else source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)  # with __pycache__, so that nothing is compiled anew
            else:
                shutil.copy(ROOT / source, place)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        one.removeprefix("!") for one in ignored if one.startswith("!")
    )
    variables = [words.partition("=")[0] for name, words in steps if name == "ARG"]
    assert variables == ["BASE", "EXTRAS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"]
    (command,) = [eval(words) for name, words in steps if name == "CMD"]
    page = (ROOT / "docs/launching.md").read_text()
    told = [shlex.split(line.replace("\\\n", " ")) for line in re.findall(r"^docker run (?:.*\\\n)*.*", page, re.MULTILINE)]
    assert told
    for words in [command, *(line[line.index("python") :] for line in told)]:
        program, script, *flags = words
        assert program == "python" and (tmp_path / script).is_file()
        if not full and "--help" not in flags:
            assert load([*flags, "--dry-run"], 1).dry_run is not None
            continue
        ended = subprocess.run(
            [sys.executable, script, *flags, *([] if "--help" in flags else ["--dry-run"])],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
