"""SkyPilot's own load balancer, run by its own ``run_load_balancer``, with its intervals divided.

Run with SkyPilot's Python. Says each sync and the list that it brought.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import child
import cloud
from sky.serve import load_balancer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--controller-url", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    options = parser.parse_args()

    cloud.divide_intervals(options.scale)
    sync = load_balancer.SkyServeLoadBalancer._sync_with_controller_once

    @functools.wraps(sync)
    async def observed(self: Any) -> Any:
        result = await sync(self)
        child.say("synced", urls=list(self._client_pool))
        return result

    load_balancer.SkyServeLoadBalancer._sync_with_controller_once = observed
    child.end_with_parent()
    load_balancer.run_load_balancer(options.controller_url, options.port, None, None, None)


if __name__ == "__main__":
    main()
