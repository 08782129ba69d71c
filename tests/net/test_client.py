"""The sync client: against a fake controller, and with respx where no socket is wanted."""

import gzip
import itertools
import logging
import math
import socket
import time
import traceback
from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.to_thread
import httpx
import pytest
import respx

from controller_client.client import MAX_ANSWER_BYTES, ControllerClient
from controller_client.errors import SyncError
from controller_client.protocol import SYNC_PATH, ReadyList, ReadyReplica
from controller_client.testing import (
    Answer,
    FakeController,
    ReplicaFactory,
    answer,
    hang_up,
    raw,
    stall,
    stream,
)

pytestmark = pytest.mark.anyio

URL = "http://controller:20001"


@pytest.fixture
async def client(fake_controller: FakeController) -> AsyncIterator[ControllerClient]:
    client = ControllerClient(fake_controller.url)
    yield client
    await client.aclose()


@pytest.fixture
def route() -> Iterator[respx.Route]:
    """The controller's endpoint without a controller: what the test mocks there."""
    with respx.mock() as router:
        yield router.post(URL + SYNC_PATH)


async def failure(client: ControllerClient) -> SyncError:
    with pytest.raises(SyncError) as caught:
        await client.sync([1.0])
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 200
    return caught.value


async def failure_at(url: str, *, timeout: float = 15.0) -> SyncError:
    client = ControllerClient(url, timeout=timeout)
    try:
        return await failure(client)
    finally:
        await client.aclose()


# A sync that works


async def test_a_sync_reports_arrivals_and_returns_the_ready_list(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.set_ready({"http://a:1": "A100", "http://b:2": None})
    assert await client.sync([3.5, 1.25]) == ReadyList(
        replicas=(ReadyReplica("http://a:1", "A100"), ReadyReplica("http://b:2", None)), skipped=()
    )
    assert fake_controller.arrivals == [1.25, 3.5]


async def test_an_older_controller_is_understood(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.set_ready({"http://a:1": "A100"})
    fake_controller.answer_next(Answer(old_shape=True))
    assert await client.sync([]) == ReadyList((ReadyReplica("http://a:1", None),), ())


async def test_an_empty_list_is_no_failure(client: ControllerClient) -> None:
    assert await client.sync([]) == ReadyList((), ())


async def test_a_slash_at_the_end_of_the_url_does_not_matter(
    fake_controller: FakeController,
) -> None:
    client = ControllerClient(fake_controller.url + "/")
    assert await client.sync([]) == ReadyList((), ())
    await client.aclose()


async def test_each_sync_has_a_connection_of_its_own(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    for _ in range(3):
        await client.sync([])
    assert fake_controller.connections == 3
    await anyio.to_thread.run_sync(
        fake_controller.wait_for, lambda: fake_controller.open_connections == 0
    )


async def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, fake_controller: FakeController
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    client = ControllerClient(fake_controller.url)
    assert await client.sync([]) == ReadyList((), ())
    await client.aclose()


async def test_cookies_are_not_kept(replica_factory: ReplicaFactory) -> None:
    controller = replica_factory("controller")
    controller.behave_always(
        answer(b'{"replica_info": {}}', headers=[(b"Set-Cookie", b"session=1")])
    )
    client = ControllerClient(f"http://localhost:{controller.port}")
    await client.sync([])
    await client.sync([])
    await client.aclose()
    assert [request.values(b"cookie") for request in controller.requests] == [[], []]


async def test_a_timestamp_that_is_not_finite_is_a_fault_of_the_caller(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    with pytest.raises(ValueError):
        await client.sync([math.nan])
    assert fake_controller.connections == 0


# A sync that fails


@pytest.mark.parametrize(
    ("answer", "result", "message"),
    [
        (Answer(status=500), "http_error", "the controller answered 500"),
        (Answer(status=404), "http_error", "the controller answered 404"),
        (Answer(status=304, body=b""), "http_error", "the controller answered 304"),
        (Answer(body=b"junk"), "bad_payload", "the controller's answer is not JSON"),
        (Answer(body=b""), "bad_payload", "the controller's answer is not JSON"),
        (Answer(body=b"null"), "bad_payload", "the controller's answer is not a JSON object"),
        (Answer(cut=True), "connect_error", "the controller sent no whole HTTP answer"),
        (
            Answer(unread=True),
            "connect_error",
            "cannot reach the controller: Connection reset by peer",
        ),
    ],
)
async def test_a_failed_sync_names_its_cause_and_the_next_one_works(
    client: ControllerClient,
    fake_controller: FakeController,
    answer: Answer,
    result: str,
    message: str,
) -> None:
    fake_controller.answer_next(answer)
    error = await failure(client)
    assert (error.result, str(error)) == (result, message)
    assert await client.sync([2.0]) == ReadyList((), ())


async def test_a_controller_that_refuses(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.refuse()
    error = await failure(client)
    assert error.result == "connect_error"
    assert str(error) == "cannot reach the controller: Connection refused"
    fake_controller.accept()
    assert await client.sync([2.0]) == ReadyList((), ())
    assert fake_controller.arrivals == [2.0]


@pytest.mark.parametrize(
    "behaviour", [hang_up(), raw(b"220 mail.example ESMTP\r\n", close=True), raw(b"\0" * 99)]
)
async def test_what_is_no_http(replica_factory: ReplicaFactory, behaviour: object) -> None:
    controller = replica_factory("controller")
    controller.behave_always(behaviour)  # type: ignore[arg-type]
    error = await failure_at(controller.url)
    assert error.result == "connect_error"
    assert str(error) == "the controller sent no whole HTTP answer"


async def test_a_redirect_is_not_followed(
    fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    controller = replica_factory("controller")
    target = (fake_controller.url + SYNC_PATH).encode()
    controller.behave(
        raw(b"HTTP/1.1 307 Moved\r\nLocation: " + target + b"\r\nContent-Length: 0\r\n\r\n")
    )
    error = await failure_at(controller.url)
    assert (error.result, str(error)) == ("http_error", "the controller answered 307")
    assert fake_controller.connections == 0


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://127.0.0.1:1", "http://", "http://\0", "http://127.0.0.1:x"]
)
async def test_a_url_that_is_none(url: str) -> None:
    error = await failure_at(url)
    assert error.result == "connect_error"
    assert str(error) == "the controller's URL is no http:// URL"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:1/\udc80", "http://xn--a:1"]
)
async def test_a_url_that_only_fails_on_the_way(url: str) -> None:
    assert (await failure_at(url)).result == "connect_error"


@pytest.mark.parametrize(
    ("raised", "result"),
    [
        (httpx.ConnectTimeout("x"), "timeout"),
        (httpx.ReadTimeout("x"), "timeout"),
        (httpx.PoolTimeout("x"), "timeout"),
        (httpx.ConnectError("x"), "connect_error"),
        (httpx.WriteError("x"), "connect_error"),
        (httpx.LocalProtocolError("x"), "connect_error"),
        (httpx.RemoteProtocolError("x"), "connect_error"),
        (httpx.DecodingError("x"), "connect_error"),
        (httpx.CookieConflict("x"), "connect_error"),
        (httpx.InvalidURL("x"), "connect_error"),
        (httpx.StreamConsumed(), "connect_error"),
        (OverflowError("x"), "connect_error"),
    ],
    ids=repr,
)
async def test_whatever_the_stack_raises_is_a_sync_error(
    route: respx.Route, raised: Exception, result: str
) -> None:
    route.side_effect = raised
    assert (await failure_at(URL)).result == result


async def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    error = await failure_at(URL)
    assert error.result == "connect_error"
    assert str(error) == "cannot reach the controller: Name or service not known"


async def test_a_closed_client_fails_as_a_sync_does(client: ControllerClient) -> None:
    await client.aclose()
    assert (await failure(client)).result == "connect_error"


async def test_secrets_stay_out_of_errors_and_logs(
    caplog: pytest.LogCaptureFixture, replica_factory: ReplicaFactory
) -> None:
    caplog.set_level(logging.DEBUG)
    controller = replica_factory("controller")
    controller.behave_always(
        raw(b"HTTP/1.1 200 OK\r\nX-Token: hidden\r\nContent-Length: 6\r\n\r\nhidden"),
        raw(b"HTTP/1.1 500 hidden\r\nContent-Length: 6\r\n\r\nhidden"),
        raw(b"hidden\r\n\r\n", close=True),
    )
    for _ in range(3):
        error = await failure_at(controller.url.replace("//", "//user:hidden@"))
        assert "hidden" not in "".join(traceback.format_exception(error))
    assert [record for record in caplog.records if record.name.startswith("http")] == []


# Time and size


async def bounded_failure(url: str) -> SyncError:
    started = time.monotonic()
    error = await failure_at(url, timeout=0.3)
    assert 0.25 < time.monotonic() - started < 1.3
    assert (error.result, str(error)) == ("timeout", "the controller did not answer within 0.3 s")
    return error


async def test_the_timeout_bounds_a_silent_controller(replica_factory: ReplicaFactory) -> None:
    controller = replica_factory("controller")
    controller.behave(stall())
    await bounded_failure(controller.url)
    await anyio.to_thread.run_sync(
        controller.wait_for, lambda: controller.requests[0].peer_closed_at is not None
    )


async def test_the_timeout_bounds_a_controller_that_drips(replica_factory: ReplicaFactory) -> None:
    controller = replica_factory("controller")
    controller.behave(stream(itertools.repeat(b" "), every=0.05))
    await bounded_failure(controller.url)


async def test_the_timeout_bounds_a_connect_that_hangs(fake_controller: FakeController) -> None:
    fake_controller.stall_connects()
    await bounded_failure(fake_controller.url)
    assert fake_controller.connections == 0


async def test_an_answer_within_the_timeout_counts(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.answer_next(Answer(delay=0.3))
    started = time.monotonic()
    assert await client.sync([]) == ReadyList((), ())
    assert time.monotonic() - started >= 0.3


async def test_an_endless_answer_is_cut_off(replica_factory: ReplicaFactory) -> None:
    controller = replica_factory("controller")
    controller.behave(stream(itertools.repeat(b" " * 65536)))
    error = await failure_at(controller.url)
    assert error.result == "bad_payload"
    assert str(error) == f"the controller's answer is longer than {MAX_ANSWER_BYTES} bytes"
    await anyio.to_thread.run_sync(
        controller.wait_for, lambda: controller.requests[0].peer_closed_at is not None
    )


async def test_a_long_list_within_the_limit_is_read(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.set_ready([f"http://replica-{number}:8080" for number in range(20_000)])
    assert len((await client.sync([])).replicas) == 20_000


async def test_a_packed_answer_is_not_unpacked(replica_factory: ReplicaFactory) -> None:
    body = gzip.compress(b" " * 100_000_000)
    controller = replica_factory("controller")
    controller.behave(
        raw(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
    )
    error = await failure_at(controller.url)
    assert (error.result, str(error)) == ("bad_payload", "the controller's answer is not JSON")
    assert controller.requests[0].values(b"accept-encoding") == [b"identity"]


# Cancellation


async def test_cancellation_passes_and_closes_the_connection(
    client: ControllerClient, fake_controller: FakeController
) -> None:
    fake_controller.answer_next(Answer(delay=math.inf))
    ended = []

    async def sync() -> None:
        try:
            await client.sync([1.0])
        except BaseException as error:
            ended.append(type(error))
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sync)
        await anyio.to_thread.run_sync(
            fake_controller.wait_for, lambda: len(fake_controller.syncs) == 1
        )
        tasks.cancel_scope.cancel()
    assert ended == [anyio.get_cancelled_exc_class()]
    await anyio.to_thread.run_sync(
        fake_controller.wait_for, lambda: fake_controller.open_connections == 0
    )
    assert await client.sync([2.0]) == ReadyList((), ())
    assert fake_controller.arrivals == [1.0, 2.0]
