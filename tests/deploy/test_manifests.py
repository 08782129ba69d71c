"""`deploy/kubernetes`: each file is what Kubernetes takes, and all of them say the same."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from lb import __version__
from lb.kinds import duration
from lb.settings import OPTIONS, Settings, load
from tests.deploy.manifests import (
    DEPLOY,
    KUBERNETES,
    Manifest,
    balancer_of,
    controller_pod,
    of_kind,
    render,
    resources,
    skypilot_configurations,
    the,
    with_components,
)

EXAMPLE = KUBERNETES / "overlays" / "example"
SIDECARS = sorted((KUBERNETES / "sidecar").glob("*.yaml"))
CONFIGURATIONS = list(skypilot_configurations())
RESOURCES = list(resources())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
KUBERNETES_VERSIONS = all_versions()[-3:]
DEFAULT_GRACE_SECONDS = 30
# The process with no load takes 57 MiB; the rest is for connections and what is under way.
PROCESS_MIB = 256

seconds = duration(zero=True).parse
parametrize = pytest.mark.parametrize


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.fixture(scope="module")
def example() -> list[Manifest]:
    """What a user would apply."""
    return render(EXAMPLE)


def pod_of(manifests: list[Manifest]) -> Manifest:
    return the(manifests, "Deployment")["spec"]["template"]


def environment_of(container: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def settings_of(container: Manifest) -> Settings:
    """The settings with which the container would run. Raises SettingsError for a misspelt one."""
    command, *words = container["args"]
    assert command == "serve"
    names = {flag: option.name for option in OPTIONS for flag in option.flags}
    flags = dict(zip(words[::2], words[1::2], strict=True))
    values = {names[flag]: text for flag, text in flags.items()}
    return load(values, environment_of(container))


def ports_of(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Does a label selector, which is not empty, select these labels?"""
    pairs = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", [])
    assert pairs or expressions, "it selects everything"
    assert all(each["operator"] == "In" for each in expressions)
    return pairs.items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


# --- Kubernetes takes them ----------------------------------------------------------------------


@parametrize("version", KUBERNETES_VERSIONS)
@parametrize(("path", "manifest"), [pytest.param(*each, id=name_of(each[0])) for each in RESOURCES])
def test_each_file_is_valid(path: Path, manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@parametrize("version", KUBERNETES_VERSIONS)
@parametrize("configuration", CONFIGURATIONS, ids=name_of)
def test_the_controllers_pod_with_each_sidecar_is_valid(configuration: Path, version: str) -> None:
    kubernetes_validate.validate(controller_pod(configuration), version, strict=True)


@parametrize("version", KUBERNETES_VERSIONS)
def test_what_is_applied_is_valid(example: list[Manifest], version: str) -> None:
    for manifest in example:
        kubernetes_validate.validate(manifest, version, strict=True)


@parametrize("component", COMPONENTS)
def test_each_component_is_valid_with_the_base(component: str, tmp_path: Path) -> None:
    for manifest in with_components(tmp_path, component):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[-1], strict=True)


def test_the_schemas_know_every_field() -> None:
    """Or the tests above would say nothing of a misspelt one."""
    manifest = copy.deepcopy({path.stem: each for path, each in RESOURCES}["deployment"])
    manifest["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[-1], strict=True)


# --- the balancer takes its settings -----------------------------------------------------------


def containers() -> list[Any]:
    (base,) = (each for path, each in RESOURCES if path.stem == "deployment")
    pods = {"base": base["spec"]["template"]["spec"]}
    pods |= {name_of(path): controller_pod(path)["spec"] for path in CONFIGURATIONS}
    return [pytest.param(balancer_of(spec), id=name) for name, spec in pods.items()]


@parametrize("container", containers())
def test_settings_and_ports(container: Manifest) -> None:
    """A renamed option, or a value that is none, breaks this."""
    settings = settings_of(container)
    assert ports_of(container) == {"data": settings.port, "admin": settings.admin_port}
    assert (settings.host, settings.admin_host) == ("0.0.0.0", "0.0.0.0"), (
        "probes come from outside"
    )
    assert container["image"] == f"skyserve-lb:{__version__}"


def hardened() -> list[Any]:
    """All but the short example of deploy/skypilot, which is no more than a beginning."""
    return [each for each in containers() if not str(each.id).startswith("skypilot")]


@parametrize("container", hardened())
def test_the_container_can_do_little(container: Manifest) -> None:
    assert (
        container["securityContext"].items()
        >= {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }.items()
    )
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin"}
    replay = settings_of(container).replay_budget / 2**20
    assert container["resources"]["limits"] == {"memory": "1Gi"}
    assert replay + PROCESS_MIB <= 1024


@parametrize(
    "spec", [pytest.param(controller_pod(path)["spec"], id=path.stem) for path in SIDECARS]
)
def test_a_sidecar_is_of_no_account(spec: Manifest) -> None:
    context = balancer_of(spec)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == 65532
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


# --- the end of a pod --------------------------------------------------------------------------


def seconds_before_sigterm(container: Manifest) -> float:
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    words = command[-1].replace(";", "").split() if command[0] == "sh" else command
    assert words[0] == "sleep"
    return float(words[1])


def test_the_grace_is_enough_for_the_hook_and_the_drain(example: list[Manifest]) -> None:
    specs = [pod_of(example)["spec"], *(controller_pod(path)["spec"] for path in SIDECARS)]
    for spec in specs:
        container = balancer_of(spec)
        grace = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        before = seconds_before_sigterm(container)
        # After SIGTERM new connections are taken for a second only: endpoints go first.
        assert before >= 5
        assert grace > before + settings_of(container).drain_timeout


def test_only_the_native_sidecar_has_to_signal_itself() -> None:
    plain, native = (
        controller_pod(KUBERNETES / "sidecar" / f"{each}.yaml")["spec"]
        for each in ("plain", "native")
    )
    assert "initContainers" not in plain, "it would displace SkyPilot's own"
    assert [each["name"] for each in native["containers"]] == ["ray-node"]
    assert native["initContainers"][0]["restartPolicy"] == "Always"
    assert "kill -TERM 1" in balancer_of(native)["lifecycle"]["preStop"]["exec"]["command"][-1]


@parametrize("path", [*SIDECARS, *CONFIGURATIONS], ids=name_of)
def test_a_sidecar_does_not_keep_the_controllers_pod_from_being_ready(path: Path) -> None:
    """SkyPilot waits for that pod before there can be a replica, and its DNS name hangs on it."""
    assert "readinessProbe" not in balancer_of(controller_pod(path)["spec"])


# --- they agree --------------------------------------------------------------------------------


def test_the_service_leads_to_the_balancers(example: list[Manifest]) -> None:
    service, pod = the(example, "Service"), pod_of(example)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == "data"
    assert "data" in ports_of(balancer_of(pod["spec"]))


def test_every_selector_selects_the_balancers(example: list[Manifest]) -> None:
    labels = pod_of(example)["metadata"]["labels"]
    deployment = the(example, "Deployment")["spec"]
    own, controllers = policies(example)
    (allowed,) = (rule["from"][0] for rule in controllers["spec"]["ingress"] if "from" in rule)
    selectors = [
        deployment["selector"],
        *(
            each["labelSelector"]
            for each in deployment["template"]["spec"]["topologySpreadConstraints"]
        ),
        the(example, "PodDisruptionBudget")["spec"]["selector"],
        own["spec"]["podSelector"],
        allowed["podSelector"],
    ]
    for selector in selectors:
        assert matches(selector, labels)
        # Another service's balancers are not meant.
        assert not matches(selector, labels | {"app.kubernetes.io/instance": "another"})


def policies(manifests: list[Manifest]) -> tuple[Manifest, Manifest]:
    """That of the balancers and that of the controller."""
    controllers, own = sorted(
        of_kind(manifests, "NetworkPolicy"),
        key=lambda each: "controller" not in each["metadata"]["name"],
    )
    return own, controllers


def test_the_policy_of_the_balancers_leaves_clients_the_data_port_alone(
    example: list[Manifest],
) -> None:
    own, _ = policies(example)
    clients, monitoring = own["spec"]["ingress"]
    assert clients == {"ports": [{"port": "data"}]}
    assert (bool(monitoring["from"]), monitoring["ports"]) == (True, [{"port": "admin"}])
    ports = ports_of(balancer_of(pod_of(example)["spec"]))
    assert {"data", "admin"} <= ports.keys()


def test_only_balancers_reach_the_controllers_port(example: list[Manifest]) -> None:
    _, controllers = policies(example)
    url = settings_of(balancer_of(pod_of(example)["spec"])).controller_url
    host, port = url.removeprefix("http://").rsplit(":", 1)
    # SkyPilot calls the Service of a cluster <cluster>-head, and labels its pod with the cluster.
    labels = {"skypilot-cluster-name": host.removesuffix("-head"), "parent": "skypilot"}
    assert matches(controllers["spec"]["podSelector"], labels)
    replicas = labels | {"skypilot-cluster-name": "my-service-1"}
    assert not matches(controllers["spec"]["podSelector"], replicas)

    def open_to_all(number: int) -> bool:
        return any("from" not in rule for rule in rules_for(controllers, number))

    assert rules_for(controllers, int(port))
    assert not open_to_all(int(port))
    # SSH, Ray and the stock balancers stay as they are; no port is forgotten.
    assert [number for number in range(1, 65536) if not open_to_all(number)] == [
        *range(20001, 20101)
    ]
    assert {each["metadata"].get("namespace") for each in example} == {"default"}


def rules_for(policy: Manifest, number: int) -> list[Manifest]:
    return [
        rule
        for rule in policy["spec"]["ingress"]
        if any(each["port"] <= number <= each["endPort"] for each in rule["ports"])
    ]


def test_the_number_of_balancers_is_the_autoscalers(example: list[Manifest]) -> None:
    deployment = the(example, "Deployment")
    scaler = the(example, "HorizontalPodAutoscaler")["spec"]
    target = {key: deployment[key] for key in ("apiVersion", "kind")}
    assert scaler["scaleTargetRef"] == target | {"name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"]
    assert scaler["minReplicas"] >= 2
    # One step down drains for as long as this; the next is taken after it, not beside it.
    drain = settings_of(balancer_of(deployment["spec"]["template"]["spec"])).drain_timeout
    down = scaler["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] > drain
    assert [(each["value"], each["periodSeconds"] >= drain) for each in down["policies"]] == [
        (1, True)
    ]


def test_without_the_autoscaler_there_are_two(tmp_path: Path) -> None:
    assert the(with_components(tmp_path), "Deployment")["spec"]["replicas"] == 2


def test_with_no_replicas_balancers_stay_in_the_service_only_if_asked(
    example: list[Manifest], tmp_path: Path
) -> None:
    def ready(manifests: list[Manifest]) -> Any:
        return balancer_of(pod_of(manifests)["spec"])["readinessProbe"]["httpGet"]

    assert ready(example) == {"path": "/readyz", "port": "admin"}
    assert ready(with_components(tmp_path, "scale-to-zero")) == {"path": "/livez", "port": "admin"}


def test_an_update_never_takes_a_balancer_before_its_successor_is_ready(
    example: list[Manifest],
) -> None:
    strategy = the(example, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert (strategy["maxUnavailable"], strategy["maxSurge"]) == (0, 1)
    assert the(example, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


# --- what else names them ----------------------------------------------------------------------


@parametrize("name", ["pod-monitor", "vm-pod-scrape", "service-monitor"])
def test_the_monitoring_finds_them(name: str, example: list[Manifest]) -> None:
    monitor = yaml.safe_load((DEPLOY / "prometheus" / f"{name}.yaml").read_text())["spec"]
    container = balancer_of(pod_of(example)["spec"])
    endpoints = monitor.get("endpoints") or monitor["podMetricsEndpoints"]
    for endpoint in endpoints:
        assert endpoint.get("port", endpoint.get("targetPort")) in ports_of(container)
        rules = endpoint.get("relabelings") or endpoint["relabelConfigs"]
        (kept,) = (rule["regex"] for rule in rules if rule.get("action") == "keep")
        assert kept == container["name"]
    if monitor["selector"]:
        found = the(example, "Service") if name == "service-monitor" else pod_of(example)
        assert matches(monitor["selector"], found["metadata"]["labels"])


def test_readme_speaks_of_what_there_is(example: list[Manifest]) -> None:
    readme = (DEPLOY.parent / "README.md").read_text()
    named = set(re.findall(r"deployment/(\S+)", readme))
    assert named == {the(example, "Deployment")["metadata"]["name"]}
    assert f"`{the(example, 'Service')['metadata']['name']}`, port 80" in readme
    for component in COMPONENTS:
        assert f"| `{component}` |" in (DEPLOY / "README.md").read_text()
