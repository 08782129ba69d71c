"""Is the load balancer of this container alive? Exit code 0 or 1, for the image's HEALTHCHECK.

It finds the admin port as `skyserve-lb serve` does, by the environment: in a container give ports
as variables, not as flags. Standard library alone, for it starts every few seconds.
"""

import http.client
import os
import sys

host = os.environ.get("SKYSERVE_LB_ADMIN_HOST") or "127.0.0.1"
port = os.environ.get("SKYSERVE_LB_ADMIN_PORT") or int(os.environ["SKYSERVE_LB_PORT"]) + 1000
try:
    connection = http.client.HTTPConnection(host, int(port), timeout=2)
    connection.request("GET", "/livez")
    status = connection.getresponse().status
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"{host}:{port}: {error}")
if status != http.client.OK:
    sys.exit(f"{host}:{port}: /livez answers {status}")
