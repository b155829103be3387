"""What we ship for Kubernetes, Slurm and containers, as far as it can be tried without them: schemas, restricted security, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from torch_watchdog.cli.serve import command as serve
from torch_watchdog_proto.messages import EXIT_BAD_DATA, EXIT_DIVERGED, EXIT_MACHINE

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CORE = {"Namespace", "ServiceAccount", "PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"}


def documents() -> list[dict[str, Any]]:
    return [document for file in FILES for document in yaml.safe_load_all(file.read_text())]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec in it, however deep."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


def test_objects_of_kubernetes_itself_fit_its_schema() -> None:
    seen = set()
    for document in documents():
        if document["kind"] in CORE:
            kubernetes_validate.validate(document, "1.29", strict=True)
            seen.add(document["kind"])
    assert seen == CORE


def test_the_pods_of_the_examples_fit_the_schema_of_a_pod() -> None:
    found = [pod for document in documents() for pod in pods(document)]
    assert len(found) >= 4
    for pod in found:
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}, "1.29", strict=True)


def test_every_pod_may_run_where_pod_security_is_restricted() -> None:
    for pod in (pod for document in documents() for pod in pods(document)):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not pod.get("hostNetwork") and not pod.get("hostPID")
        for container in pod["containers"]:
            safe = container["securityContext"]
            assert not safe["allowPrivilegeEscalation"] and safe["readOnlyRootFilesystem"] and safe["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_the_daemons_arguments_are_options_of_serve_and_its_ports_fit() -> None:
    (deployment,) = (document for document in documents() if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = {option for parameter in serve.params for option in parameter.opts}
    assert container["args"][0] == "serve" and {word for word in container["args"] if word.startswith("--")} <= options
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": 9470, "web": 9471}
    assert CliRunner().invoke(serve, ["--help"]).exit_code == 0


def test_a_jobset_starts_again_what_can_be_helped_and_ends_what_cannot() -> None:
    (jobset,) = (document for document in documents() if document["kind"] == "JobSet")
    rules = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in rules}
    assert by_action == {"FailJob": [EXIT_BAD_DATA, EXIT_DIVERGED], "Ignore": None, "Count": [EXIT_MACHINE]}
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}, "1.29", strict=True)


@pytest.mark.parametrize(("code", "again"), [(0, False), (65, False), (70, False), (75, True), (143, True), (138, True), (1, False)])
def test_slurm_requeues_only_where_that_can_help(tmp_path: Path, code: int, again: bool) -> None:
    programs = {
        "srun": f'echo "$@" > {tmp_path}/srun; exit {code}',
        "scontrol": f'[ "$1" = show ] && echo node-a || echo "$@" >> {tmp_path}/asked',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "runs" / "training-7" / "checkpoints").mkdir(parents=True)
    known = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "training", "SLURM_JOB_NUM_NODES": "2"}
    environment = os.environ | known | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNS": str(tmp_path / "runs")}
    done = subprocess.run(["bash", str(DEPLOY / "slurm" / "train.sbatch")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ((tmp_path / "asked").exists() and (tmp_path / "asked").read_text() == "requeue 7\n") == again
    line = (tmp_path / "srun").read_text()
    assert (
        "watchdog --dir" in line and f"--resume {tmp_path}/runs/training-7/checkpoints" in line and "--rdzv-endpoint node-a:29400" in line
    )


def test_the_image_runs_as_nobody_and_copies_no_secret() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("FROM"))
    assert [line for line in lines[last:] if line.startswith("USER")] == ["USER 65532:65532"]
    assert not any(re.match(r"ADD |COPY \. |.*TOKEN=", line) for line in lines)
    assert (DEPLOY.parent / ".dockerignore").read_text().startswith("*\n")
