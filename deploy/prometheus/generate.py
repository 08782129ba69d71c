"""Makes the resources for Prometheus' and VictoriaMetrics' operators: `python deploy/prometheus/generate.py`.

The rules come from rules.yaml. What is scraped, and how, is here, once for the three resources that
say it. They select by container, not by label: so they find the balancers of deploy/kubernetes as well
as those in the pods of SkyPilot's controllers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
NAME = "skyserve-lb"
PORT = "admin"
INTERVAL = "15s"

PROMETHEUS = "monitoring.coreos.com/v1"
VICTORIA_METRICS = "operator.victoriametrics.com/v1beta1"

OURS = {"sourceLabels": ["__meta_kubernetes_pod_container_name"], "regex": NAME, "action": "keep"}
# The job by which rules.yaml knows the targets.
JOB = {"targetLabel": "job", "replacement": NAME}
ENDPOINT = {"path": "/metrics", "interval": INTERVAL}


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": NAME}
    metadata = {"name": NAME, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def resources() -> dict[str, dict[str, Any]]:
    """The content of each file, by its name."""
    rules = yaml.safe_load((HERE / "rules.yaml").read_text(encoding="utf-8"))
    pods = {"port": PORT, **ENDPOINT}
    services = {
        "targetPort": PORT,  # of the pods: the Service does not offer it
        **ENDPOINT,
        "honorLabels": True,  # else the Service's name displaces the label `service`
        "relabelings": [OURS, JOB],
    }
    return {
        "prometheus-rule.yaml": resource(PROMETHEUS, "PrometheusRule", rules),
        "vm-rule.yaml": resource(VICTORIA_METRICS, "VMRule", rules),
        "pod-monitor.yaml": resource(
            PROMETHEUS,
            "PodMonitor",
            {"selector": {}, "podMetricsEndpoints": [{**pods, "relabelings": [OURS, JOB]}]},
        ),
        "service-monitor.yaml": resource(
            PROMETHEUS,
            "ServiceMonitor",
            {
                "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
                "endpoints": [services],
            },
        ),
        "vm-pod-scrape.yaml": resource(
            VICTORIA_METRICS,
            "VMPodScrape",
            {"selector": {}, "podMetricsEndpoints": [{**pods, "relabelConfigs": [OURS, JOB]}]},
        ),
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def files() -> dict[str, str]:
    """The text of each file, by its name."""
    head = "# Made by generate.py: change that, or rules.yaml, and not this.\n"
    return {
        name: head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=110)
        for name, content in resources().items()
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8")
