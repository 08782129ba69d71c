"""Three balancers of one service: none knows of the others, and all is well all the same."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from controller_client.testing import (
    Answer,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    hold,
)
from tests.net.harness import RawClient, request
from tests.system.process import Serve

BALANCERS = 3
SYNC_SECONDS = 0.4


@pytest.fixture(scope="module")
def controller() -> Iterator[FakeController]:
    with FakeController() as running:
        yield running
    assert not running.faults


@pytest.fixture(scope="module")
def replicas(controller: FakeController) -> Iterator[list[ScriptedReplica]]:
    """Eight, all of them ready."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(ScriptedReplica(str(number))) for number in range(8)]
        controller.set_ready([replica.url for replica in made])
        yield made


@pytest.fixture(scope="module")
def balancers(controller: FakeController, replicas: list[ScriptedReplica]) -> Iterator[list[Serve]]:
    """One for all tests, for three processes take their time to start."""
    interval = f"{SYNC_SECONDS * 1000:.0f}ms"
    starting = [Serve(controller.url, "--sync-interval", interval) for _ in range(BALANCERS)]
    with contextlib.ExitStack() as stack:
        for balancer in starting:
            stack.enter_context(balancer)
        for balancer in starting:
            balancer.wait_for_replicas(len(replicas))
        yield starting


@pytest.fixture(autouse=True)
def nothing_before(replicas: list[ScriptedReplica]) -> None:
    for replica in replicas:
        replica.behave_always()
        replica.requests.clear()


def counts(replicas: Sequence[ScriptedReplica]) -> list[int]:
    return [len(replica.requests) for replica in replicas]


def wait_for_requests(replicas: Sequence[ScriptedReplica], total: int) -> None:
    """Until so many have come in all; each replica tells of its own alone."""
    deadline = time.monotonic() + 20
    while sum(counts(replicas)) < total:
        assert time.monotonic() < deadline, counts(replicas)
        time.sleep(0.002)


def test_balancers_with_little_to_do_do_not_meet_on_one_replica(
    balancers: list[Serve], replicas: list[ScriptedReplica]
) -> None:
    """One request through each at a time, as a gateway that takes turns would send them.

    It comes first: right after a list with new replicas all balancers stand at the same place.
    """
    rounds, met = 12, 0
    for _ in range(rounds):
        go, before = threading.Event(), counts(replicas)
        for replica in replicas:
            replica.behave_always(hold(go))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(balancer.client()) for balancer in balancers]
            for client in clients:
                client.send(request())
            wait_for_requests(replicas, sum(before) + BALANCERS)
            now = counts(replicas)
            met += max(n - b for n, b in zip(now, before, strict=True)) == BALANCERS
            go.set()
            for client in clients:
                assert client.answer().status == 200
    # By chance it is one round of 64.
    assert met <= rounds / 3


def load(balancers: list[Serve], replicas: list[ScriptedReplica]) -> int:
    """Four clients of each balancer that ask again and again; how many requests it came to."""
    clients, each = 4 * BALANCERS, 40
    for replica in replicas:
        replica.behave_always(answer(delay=0.005))

    def ask(number: int) -> None:
        with balancers[number % BALANCERS].client() as client:
            for turn in range(each):
                assert client.ask(request(target=f"/{number}/{turn}")).status == 200

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    return clients * each


def test_even_load(balancers: list[Serve], replicas: list[ScriptedReplica]) -> None:
    share = load(balancers, replicas) / len(replicas)
    assert all(0.8 * share < count < 1.2 * share for count in counts(replicas)), counts(replicas)


def test_exact_arrivals(
    balancers: list[Serve], replicas: list[ScriptedReplica], controller: FakeController
) -> None:
    """Two of the syncs fail before the controller has stored anything."""
    begun = time.time()

    def reported() -> int:
        return sum(timestamp >= begun for timestamp in controller.arrivals)

    controller.answer_next(*2 * [Answer(status=500, stored=False)])
    total = load(balancers, replicas)
    seen = Counter(record.target for replica in replicas for record in replica.requests)
    assert (len(seen), set(seen.values())) == (total, {1})
    # Each is reported, and none a second time by the syncs that follow.
    controller.wait_for(lambda: reported() >= total)
    controller.wait_for_sync(len(controller.syncs) + 2 * BALANCERS)
    assert reported() == total


def test_syncs_drift_apart(balancers: list[Serve], controller: FakeController) -> None:
    """Balancers that were started at one moment do not go on calling at one moment."""
    # One request at a time: the time at which it was under way tells whose an arrival is.
    under_way: list[tuple[float, float, int]] = []
    ended = threading.Event()

    def ask() -> None:
        for number in itertools.cycle(range(BALANCERS)):
            begun = time.time()
            assert balancers[number].ask(request()).status == 200
            under_way.append((begun, time.time(), number))
            if ended.is_set():
                return

    first, started = len(controller.syncs), time.time()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            controller.wait_for_sync(first + 12 * BALANCERS, timeout=60)
        finally:
            ended.set()
        asking.result()
    calls: list[list[float]] = [[] for _ in range(BALANCERS)]
    for sync in controller.syncs[first:]:
        if sync.timestamps and sync.timestamps[-1] > started:
            calls[owner(under_way, sync.timestamps[-1])].append(sync.received_at)
    for times in calls:
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert len(gaps) >= 8
        # Within a tenth of the interval, either way; what the machine adds makes it no narrower.
        assert max(gaps) - min(gaps) > 0.06 * SYNC_SECONDS, gaps


def owner(under_way: Sequence[tuple[float, float, int]], timestamp: float) -> int:
    """Whose request was under way then."""
    return next(number for begun, end, number in under_way if begun <= timestamp <= end)


def test_a_new_replica_gets_its_share_and_no_more(
    balancers: list[Serve],
    replicas: list[ScriptedReplica],
    replica_factory: ReplicaFactory,
    controller: FakeController,
) -> None:
    """Each balancer sees the load that it made itself: that is enough, for each keeps to its part."""
    go = threading.Event()
    new = replica_factory("new")
    everyone = [*replicas, new]
    for replica in everyone:
        replica.behave_always(hold(go))
    with contextlib.ExitStack() as stack:
        stack.callback(go.set)
        waiting: list[RawClient] = []

        def send(rounds: int) -> None:
            """So many requests through each balancer, which stay in flight."""
            for _ in range(rounds):
                for balancer in balancers:
                    client = stack.enter_context(balancer.client())
                    client.send(request())
                    waiting.append(client)
            wait_for_requests(everyone, len(waiting))

        send(3 * len(replicas))
        assert counts(everyone) == [3 * BALANCERS] * len(replicas) + [0]
        controller.set_ready([replica.url for replica in everyone])
        for balancer in balancers:
            balancer.wait_for_replicas(len(everyone))
        for _ in range(8):
            send(1)
            # Never above the fullest of the others: nobody sends it what is another's part.
            assert len(new.requests) <= max(counts(replicas))
        assert max(counts(everyone)) - min(counts(everyone)) <= BALANCERS
        go.set()
        for client in waiting:
            assert client.answer().status == 200
