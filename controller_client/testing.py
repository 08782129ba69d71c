"""A pytest plugin: a fake SkyServe controller and scriptable replicas, on real sockets.

It is loaded by itself wherever the package `skyserve-lb` is installed.

    from controller_client.testing import Answer, reset

    def test_it(fake_controller, replica_factory):
        a, b = replica_factory("a"), replica_factory("b")
        fake_controller.set_ready([a.url, b.url])
        fake_controller.answer_next(Answer(status=500), Answer(body=b"junk"), Answer(delay=8))
        b.behave(reset())
        ...  # start what is to be tested, with fake_controller.url
        fake_controller.wait_for_sync(4)
        assert [request.method for request in a.requests] == ["GET"]

Each fake runs in a thread of its own, so that tests with and without an event loop can use it.
What blocks (`wait_for`, `wait_for_sync`) would also block the loop of an async test; there:

    await anyio.to_thread.run_sync(fake_controller.wait_for_sync, 4)
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

from controller_client.fakes.behaviours import (
    answer,
    cut,
    early,
    hang_up,
    hold,
    raw,
    reset,
    stale,
    stall,
    stream,
)
from controller_client.fakes.controller import Answer, FakeController, SyncRecord
from controller_client.fakes.exchange import Behaviour, Exchange, RequestRecord
from controller_client.fakes.replica import ScriptedReplica
from controller_client.fakes.server import PeerClosedError

__all__ = [
    "Answer",
    "Behaviour",
    "Exchange",
    "FakeController",
    "PeerClosedError",
    "ReplicaFactory",
    "RequestRecord",
    "ScriptedReplica",
    "SyncRecord",
    "answer",
    "cut",
    "early",
    "hang_up",
    "hold",
    "raw",
    "reset",
    "stale",
    "stall",
    "stream",
]


class ReplicaFactory(Protocol):
    """Starts a replica; what it takes is what ScriptedReplica takes."""

    def __call__(
        self,
        name: str = ...,
        *,
        port: int = ...,
        keep_body: int = ...,
        idle_timeout: float | None = ...,
    ) -> ScriptedReplica: ...


@pytest.fixture
def fake_controller() -> Iterator[FakeController]:
    """A running FakeController. The test fails when a caller did something wrong to it.

    A test that provokes such a fault checks `faults` and clears it.
    """
    with FakeController() as controller:
        yield controller
    assert not controller.faults


@pytest.fixture
def replica_factory() -> Iterator[ReplicaFactory]:
    """A function that starts a ScriptedReplica; all of them are closed after the test.

    The test fails when one of them received what is no HTTP, unless it has cleared `faults`.
    """
    replicas = []
    with ExitStack() as stack:

        def start(name: str = "replica", **options: Any) -> ScriptedReplica:
            replica = stack.enter_context(ScriptedReplica(name, **options))
            replicas.append(replica)
            return replica

        yield start
    assert not [fault for replica in replicas for fault in replica.faults]
