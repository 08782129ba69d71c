"""The files of ``deploy`` as Kubernetes would get them."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
# SkyPilot's own container in the controller's pod, as far as it matters here.
CONTROLLER_POD: Manifest = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sky-serve-controller-1a2b3c4d-1a2b3c4d-head"},
    "spec": {"containers": [{"name": "ray-node", "image": "skypilot"}]},
}


def render(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send. kubectl carries kustomize; no cluster is asked."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, and nothing else here renders a kustomization")
    done = subprocess.run(
        ("kubectl", "kustomize", str(folder)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def with_components(folder: Path, *components: str) -> list[Manifest]:
    """The base with these components, through a kustomization made in `folder`."""
    there = os.path.relpath(KUBERNETES, folder)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{there}/base"],
        "components": [f"{there}/components/{component}" for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(folder)


def resources() -> Iterator[tuple[Path, Manifest]]:
    """Every file that is a manifest of its own, as it is."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        if "kind" in manifest and path.name != "kustomization.yaml":
            yield path, manifest


def skypilot_configurations() -> Iterator[Path]:
    """Every file for ~/.sky/config.yaml that adds to the controller's pod."""
    for path in sorted(DEPLOY.rglob("*.yaml")):
        if "pod_config" in path.read_text():
            yield path


def controller_pod(configuration: Path) -> Manifest:
    """The controller's pod with what the file adds, joined as SkyPilot does: lists grow."""
    serve = yaml.safe_load(configuration.read_text())["serve"]
    overrides = serve["controller"]["resources"]["_cluster_config_overrides"]
    pod = copy.deepcopy(CONTROLLER_POD)
    for key, value in overrides["kubernetes"]["pod_config"]["spec"].items():
        if isinstance(value, list):
            pod["spec"].setdefault(key, []).extend(value)
        else:
            pod["spec"][key] = value
    return pod


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def the(manifests: list[Manifest], kind: str) -> Manifest:
    (one,) = of_kind(manifests, kind)
    return one


def balancer_of(pod_spec: Manifest) -> Manifest:
    """The balancer's container, plain or a native sidecar."""
    containers = [*pod_spec["containers"], *pod_spec.get("initContainers", [])]
    (one,) = (each for each in containers if each["name"] == "skyserve-lb")
    return one
