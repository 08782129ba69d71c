"""Fixtures: a balancer on real sockets, in front of the fakes of `controller_client.testing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from controller_client.testing import FakeController, ScriptedReplica
from tests.net.harness import RunningBalancer

StartBalancer = Callable[..., RunningBalancer]


@pytest.fixture
def start_balancer(fake_controller: FakeController) -> Iterator[StartBalancer]:
    """Start a balancer in front of these replicas; settings as keyword arguments, as text."""
    with ExitStack() as stack:

        def start(*replicas: ScriptedReplica, **settings: str) -> RunningBalancer:
            fake_controller.set_ready([replica.url for replica in replicas])
            balancer = stack.enter_context(RunningBalancer(fake_controller.url, **settings))
            balancer.wait_for_replicas(len(replicas))
            return balancer

        yield start
