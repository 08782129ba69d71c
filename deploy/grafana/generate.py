"""Makes the dashboard, and the GrafanaDashboard resource of it: `python deploy/grafana/generate.py`.

A row is a list of panels; a panel is a title, its queries with their legends, and how it is drawn. The
queries are tried on a real Prometheus by tests/system/test_prometheus.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
NAME = "skyserve-lb"
WIDTH = 24  # of Grafana's grid

Json = dict[str, Any]

OF_SERVICE = 'namespace=~"$namespace", service=~"$service"'
HERE_ONLY = OF_SERVICE + ', instance=~"$instance"'
# The two numbers of the objective: a client that left is in neither.
JUDGED = 'outcome!="client_closed"'
FAILED = 'outcome=~"upstream_error|lb_error"'
# Latency of what replicas answered: own refusals are quick, and would make it look good.
ANSWERED = 'outcome=~"ok|client_error|upstream_error"'
BUDGET = "0.001"  # as in ../prometheus/rules.yaml


def of(metric: str, *matchers: str) -> str:
    """A selector of one of our metrics."""
    return f"skyserve_lb_{metric}{{{', '.join((HERE_ONLY, *matchers))}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    inner = f"rate({of(metric, *matchers)}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(fraction: float, metric: str, *matchers: str, by: str = "le") -> str:
    return f"histogram_quantile({fraction}, {rate(metric + '_bucket', *matchers, by=by)})"


def share_within(seconds: str, metric: str) -> str:
    """The share of answers within this time, which is an edge of the histogram, over the range shown."""
    edge = rf'le=~"{seconds}(\\.0)?"'
    within = f"sum(increase({of(metric + '_bucket', ANSWERED, edge)}[$__range]))"
    return f"{within} / sum(increase({of(metric + '_count', ANSWERED)}[$__range]))"


# --- panels -------------------------------------------------------------------------------------


def panel(
    kind: str,
    title: str,
    queries: dict[str, str],
    *,
    unit: str = "short",
    width: int = 8,
    height: int = 8,
    text: str = "",
    options: Json | None = None,
    custom: Json | None = None,
    **defaults: Any,
) -> Json:
    """`queries` has the query of each legend."""
    instant = kind == "stat"
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": custom or {}, **defaults},
            "overrides": [],
        },
        "options": options or {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "heatmap"} if kind == "heatmap" else {}),
            }
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def lines(title: str, queries: dict[str, str], *, stacked: bool = False, **rest: Any) -> Json:
    custom: Json = {"lineWidth": 1, "fillOpacity": 30 if stacked else 8, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, queries, options=options, custom=custom, min=0, **rest)


def number(title: str, queries: dict[str, str], *steps: tuple[float, str], **rest: Any) -> Json:
    """`steps`: from this value on, this colour."""
    thresholds = [{"color": "green", "value": None}, *({"color": c, "value": v} for v, c in steps)]
    return panel(
        "stat",
        title,
        queries,
        width=rest.pop("width", 3),
        height=4,
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        },
        thresholds={"mode": "absolute", "steps": thresholds},
        **rest,
    )


def heat(title: str, metric: str, *matchers: str, text: str = "") -> Json:
    query = f"sum by (le) (increase({of(metric + '_bucket', *matchers)}[$__rate_interval]))"
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "filterValues": {"le": 1e-9},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"unit": "s", "axisPlacement": "left"},
    }
    return panel("heatmap", title, {"{{le}}": query}, unit="s", text=text, options=options)


def timeline(title: str, queries: dict[str, str], *steps: tuple[float, str], **rest: Any) -> Json:
    thresholds = [
        {"color": "transparent", "value": None},
        *({"color": c, "value": v} for v, c in steps),
    ]
    return panel(
        "state-timeline",
        title,
        queries,
        custom={"fillOpacity": 70, "lineWidth": 0},
        options={"mergeValues": True, "rowHeight": 0.8, "showValue": "auto"},
        color={"mode": "thresholds"},
        thresholds={"mode": "absolute", "steps": thresholds},
        **rest,
    )


# --- the dashboard ------------------------------------------------------------------------------

ROUTABLE = "sum by (instance) (" + of("replicas", 'state=~"serving|held"') + ")"
SYNC_AGE = f"max by (instance) (time() - ({of('sync_last_success_timestamp_seconds')} > 0))"
FIRST_BYTE = "time_to_first_byte_seconds"
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def burn(window: str) -> str:
    return f"skyserve_lb:failed:ratio_rate{window}{{{OF_SERVICE}}} / {BUDGET}"


ROWS: dict[str, list[Json]] = {
    "Summary": [
        number(
            "Availability",
            {
                "": f"1 - sum(increase({of('requests_total', FAILED)}[$__range]))"
                f" / sum(increase({of('requests_total', JUDGED)}[$__range]))"
            },
            unit="percentunit",
            decimals=3,
            text="Of the requests in the range shown, without those whose client left.",
        ),
        number("Requests", {"": rate("requests_total")}, unit="reqps"),
        number(
            "Failed",
            {"": f"{rate('requests_total', FAILED)} / {rate('requests_total', JUDGED)}"},
            (0.001, "orange"),
            (0.01, "red"),
            unit="percentunit",
        ),
        number(
            "To first byte",
            {
                name: quantile(fraction, FIRST_BYTE, ANSWERED)
                for name, fraction in PERCENTILES.items()
            },
            unit="s",
            width=6,
        ),
        number("In flight", {"": f"sum({of('inflight_requests')})"}),
        number(
            "Routable replicas",
            {"": f"min({ROUTABLE})"},
            text="As the balancer sees it that knows the fewest.",
        ),
        number(
            "Sync age",
            {"": f"max({SYNC_AGE})"},
            (120, "orange"),
            (600, "red"),
            unit="s",
            text="Since a balancer last heard of its controller: the one for which it is longest.",
        ),
    ],
    "Traffic": [
        lines(
            "Requests by outcome",
            {"{{outcome}}": rate("requests_total", by="outcome")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Answers by status",
            {"{{code}}": rate("responses_total", by="code")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Answers by method",
            {"{{method}}": rate("responses_total", by="method")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Bodies",
            {
                "from clients": rate("received_bytes_total"),
                "to clients": rate("sent_bytes_total"),
            },
            unit="Bps",
        ),
        lines(
            "Clients that left",
            {"{{phase}}": rate("client_disconnects_total", by="phase")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Requests by balancer",
            {"{{instance}}": rate("requests_total", by="instance")},
            unit="reqps",
        ),
    ],
    "Errors by reason": [
        lines(
            "Failed requests",
            {"{{outcome}}": rate("requests_total", FAILED, by="outcome")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Refused by the balancer",
            {"{{reason}}": rate("rejected_requests_total", by="reason")},
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Failed attempts",
            {"{{reason}}": rate("upstream_errors_total", by="reason")},
            unit="reqps",
            stacked=True,
            text="Attempts, not requests: most of these are retried.",
        ),
        lines(
            "Retries",
            {
                "{{reason}}": rate("retries_total", by="reason"),
                "no attempt left": rate("retries_exhausted_total"),
            },
            unit="reqps",
        ),
        lines(
            "Answers 5xx",
            {"{{code}}": rate("responses_total", 'code=~"5.."', by="code")},
            unit="reqps",
            stacked=True,
        ),
    ],
    "Latency": [
        heat("To first byte", FIRST_BYTE, ANSWERED),
        heat("To last byte", "request_duration_seconds", ANSWERED),
        heat("Own time", "overhead_seconds", text="Before the send; waits and connects left out."),
        lines(
            "To first byte",
            {
                name: quantile(fraction, FIRST_BYTE, ANSWERED)
                for name, fraction in PERCENTILES.items()
            },
            unit="s",
        ),
        lines(
            "To last byte",
            {
                name: quantile(fraction, "request_duration_seconds", ANSWERED)
                for name, fraction in PERCENTILES.items()
            },
            unit="s",
        ),
        lines(
            "Own time and connects, p99",
            {
                "own time": quantile(0.99, "overhead_seconds"),
                "connect": quantile(0.99, "upstream_connect_duration_seconds"),
            },
            unit="s",
        ),
    ],
    "Saturation": [
        lines(
            "Event loop lag, p99",
            {"{{instance}}": quantile(0.99, "event_loop_lag_seconds", by="instance, le")},
            unit="s",
            text="More than 0.1 s: its core is full.",
        ),
        lines("In flight", {"{{instance}}": f"sum by (instance) ({of('inflight_requests')})"}),
        lines(
            "Oldest request",
            {"{{instance}}": f"max by (instance) ({of('inflight_oldest_seconds')})"},
            unit="s",
        ),
        lines(
            "Connections to replicas",
            {"{{state}}": f"sum by (state) ({of('pool_connections')})"},
            stacked=True,
        ),
        lines(
            "Connections taken",
            {"{{result}}": rate("pool_connections_total", by="result")},
            unit="ops",
            stacked=True,
        ),
        lines(
            "Draining balancers",
            {"{{instance}}": f"max by (instance) ({of('draining')})"},
        ),
    ],
    "Replicas": [
        timeline(
            "Replicas by state",
            {"{{state}}": f"max by (state) ({of('replicas')})"},
            (1, "blue"),
            width=12,
            text="As the balancer sees it that knows the most in this state.",
        ),
        lines(
            "Changes",
            {
                "{{change}}": f"sum by (change) (increase({of('replica_set_changes_total')}[$__rate_interval]))"
            },
            width=12,
        ),
        timeline(
            "In flight, by replica",
            {"{{replica}}": f"sum by (replica) ({of('replica_inflight_requests')})"},
            (0, "green"),
            (10, "yellow"),
            (50, "orange"),
            text="A row is as long as a balancer knows the replica.",
        ),
        lines(
            "Share of the requests",
            {
                "{{replica}}": f"{rate('replica_requests_total', by='replica')}"
                f" / scalar({rate('replica_requests_total')})"
            },
            unit="percentunit",
        ),
        lines(
            "Share that failed",
            {
                "{{replica}}": f"{rate('replica_requests_total', FAILED, by='replica')}"
                f" / {rate('replica_requests_total', JUDGED, by='replica')}"
            },
            unit="percentunit",
        ),
    ],
    "Control plane": [
        lines(
            "Syncs by result",
            {"{{result}}": f"sum by (result) (increase({of('sync_total')}[$__rate_interval]))"},
            stacked=True,
        ),
        lines(
            "Duration of a sync",
            {
                name: quantile(fraction, "sync_duration_seconds")
                for name, fraction in PERCENTILES.items()
            },
            unit="s",
        ),
        lines("Sync age", {"{{instance}}": SYNC_AGE}, unit="s"),
        lines(
            "Arrivals to report", {"{{instance}}": f"sum by (instance) ({of('arrivals_pending')})"}
        ),
        lines(
            "Arrivals given up",
            {
                "{{reason}}": f"sum by (reason) (increase({of('arrivals_dropped_total')}[$__rate_interval]))"
            },
        ),
        lines(
            "Certificate is good for",
            {
                "{{instance}}": "min by (instance) ("
                f"{of('tls_certificate_not_after_timestamp_seconds')} - time())"
            },
            unit="s",
            text="Nothing here: the data port has no TLS.",
        ),
    ],
    "Objective": [
        lines(
            "Budget burn",
            {window: burn(window) for window in ("5m", "1h", "6h", "1d", "3d")},
            width=12,
            text="1 uses up the budget of 30 days in 30 days; alerts fire at 14.4, 6, 3 and 1. Needs the"
            " recording rules of deploy/prometheus; of all instances, whatever is chosen above.",
        ),
        number(
            "Budget used",
            {
                "": f"sum(increase({of('requests_total', FAILED)}[$__range]))"
                f" / sum(increase({of('requests_total', JUDGED)}[$__range])) / {BUDGET}"
            },
            (0.5, "orange"),
            (1, "red"),
            unit="percentunit",
            width=4,
            text="By the range shown; 100 % is all that it may fail.",
        ),
        number(
            "First byte within 120 s",
            {"": share_within("120", FIRST_BYTE)},
            unit="percentunit",
            width=4,
        ),
        number(
            "Last byte within 600 s",
            {"": share_within("600", "request_duration_seconds")},
            unit="percentunit",
            width=4,
        ),
    ],
}


def variable(name: str, query: str) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # where there is no such label, too
        "current": {"text": ["All"], "value": ["$__all"]},
    }


VARIABLES: list[Json] = [
    {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
    variable("namespace", "label_values(skyserve_lb_info, namespace)"),
    variable("service", 'label_values(skyserve_lb_info{namespace=~"$namespace"}, service)'),
    variable("instance", f"label_values(skyserve_lb_info{{{OF_SERVICE}}}, instance)"),
]


def placed(rows: dict[str, list[Json]]) -> list[Json]:
    """All panels with their places: side by side, as many as fit."""
    panels: list[Json] = []
    x = y = height = 0
    for title, row in rows.items():
        x, y, height = 0, y + height, 0
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y += 1
        for each in row:
            size = each["gridPos"]
            if x + size["w"] > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append({**each, "gridPos": {"x": x, "y": y, **size}})
            x, height = x + size["w"], max(height, size["h"])
    return [{"id": number, **each} for number, each in enumerate(panels, start=1)]


def dashboard() -> Json:
    return {
        "uid": NAME,
        "title": "SkyServe load balancer",
        "tags": [NAME],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": VARIABLES},
        "panels": placed(ROWS),
    }


class _Dumper(yaml.SafeDumper):
    """Long text as it is, and not quoted."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def files() -> dict[str, str]:
    """The text of each file, by its name."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    resource = {
        "apiVersion": "grafana.integreatly.org/v1beta1",
        "kind": "GrafanaDashboard",
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/name": NAME}},
        "spec": {"instanceSelector": {"matchLabels": {"dashboards": "grafana"}}, "json": text},
    }
    head = "# Made by generate.py: change that, and not this.\n"
    return {
        "dashboard.json": text,
        "grafana-dashboard.yaml": head + yaml.dump(resource, Dumper=_Dumper, sort_keys=False),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8")
