"""The arrivals that our balancer reports drive SkyPilot's own request-rate autoscaler."""

from __future__ import annotations

from pathlib import Path

from load import Load
from service import Service

# SkyPilot's window of 60 s and its intervals, divided; the delays are those of one decision.
SCALE = 8.0
POLICY = {
    "min_replicas": 1,
    "max_replicas": 4,
    # A hair above 2: at exactly 2, 6 requests a second stand on the edge, and one request more in
    # the window would ask for a fourth replica.
    "target_qps_per_replica": 2.1,
    "upscale_delay_seconds": 5,
    "downscale_delay_seconds": 5,
}


def test_request_rate_leads_to_three_replicas_and_back_to_one(
    wheel_python: Path, tmp_path: Path
) -> None:
    service = Service(
        wheel_python, tmp_path / "home", scale=SCALE, hook="fix", replica_policy=POLICY
    )
    with service.run(replicas=1), service.our_balancer() as ours:
        with Load(ours.url, "ours", rate=6, client_timeout=30).run() as busy:
            service.wait_listed(3)
        with Load(ours.url, "ours", rate=1, client_timeout=30).run() as quiet:
            service.wait_listed(1)
    assert set(busy.outcomes()) == {"200"}
    assert set(quiet.outcomes()) == {"200"}
    # Four in the busy phase would mean that arrivals were counted twice.
    launched = {event["replica"] for event in service.controller.named("launched")}
    assert launched == {1, 2, 3}
