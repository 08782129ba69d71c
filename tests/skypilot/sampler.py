"""Samples the controller's database from outside. Run with SkyPilot's Python.

Says the active versions, the replicas and the READY ones with their versions, and how many of
those are routable. Both tables are read in one transaction, so that no sample shows a state
which the database never had.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sqlite3
import time
from pathlib import Path
from typing import Any

import child
from sky.serve import replica_managers  # noqa: F401  (to unpickle replicas)


def sample(database: sqlite3.Connection) -> dict[str, Any]:
    with database:
        database.execute("BEGIN")
        (active_json,) = database.execute("SELECT active_versions FROM services").fetchone()
        rows = database.execute("SELECT replica_info FROM replicas").fetchall()
    active = json.loads(active_json or "[]")
    replicas = [pickle.loads(row[0]) for row in rows]
    ready = [replica for replica in replicas if replica.is_ready]
    return {
        "active": active,
        "replicas": [(replica.replica_id, replica.version) for replica in replicas],
        "ready": [(replica.replica_id, replica.version) for replica in ready],
        "routable": sum(replica.version in active for replica in ready),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval", type=float, required=True)
    options = parser.parse_args()
    child.end_with_parent()
    path = Path("~/.sky/serve/services.db").expanduser()
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, timeout=10)
    while True:
        child.say("sampled", **sample(database))
        time.sleep(options.interval)


if __name__ == "__main__":
    main()
