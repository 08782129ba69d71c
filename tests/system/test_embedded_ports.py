"""Ports of replicas and balancers: nobody gets one that was given to somebody else and is not used yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

from controller_client.embedded import places

LOOK = "from controller_client.embedded import places; places.PORTS = range({0}, {0} + 1); places.free_port()"


def test_one_that_was_given_out_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = places.free_port()
    monkeypatch.setattr(places, "PORTS", range(port, port + 1))
    with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
        places.free_port()
    # Nor by another process.
    looked = subprocess.run(
        [sys.executable, "-c", LOOK.format(port)],
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"OSError: no port from {port} to {port} is free" in looked.stderr


def test_no_more_are_held_than_need_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_HELD", 2)
    ports = [places.free_port() for _ in range(4)]
    assert [hold.getsockname()[1] for hold in places._held] == ports[-2:]
