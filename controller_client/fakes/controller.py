"""A fake of SkyServe's controller: it answers syncs as a test scripts them."""

import asyncio
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller_client.fakes.http import (
    BadRequestError,
    RequestHead,
    read_body,
    read_head,
    response,
)
from controller_client.fakes.script import Script
from controller_client.fakes.server import BACKLOG, Connection, Server
from controller_client.protocol import SYNC_PATH, UNKNOWN_ACCELERATOR

JSON = (b"Content-Type", b"application/json")
CLOSE = (b"Connection", b"close")

Ready = Sequence[str] | Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one sync is answered; without arguments: at once, 200, with the ready list.

    - `ready`: these replicas in the place of those of `set_ready`;
    - `status`: any but 200 comes with a small JSON body;
    - `body`: these bytes in the place of the ready list;
    - `old_shape`: the ready list as older releases wrote it, `ready_replica_urls`;
    - `delay`: seconds between the call and its answer; `math.inf` = never;
    - `stored`: False = it fails before the arrivals were stored. The real controller stores
      first and builds the list then, so that its 500 may come after they were counted;
    - `cut`: the connection is closed in the middle of the body;
    - `unread`: the connection is reset before the body of the call is read;
    - `then_refuse`: after this answer connections are refused for so many seconds.
    """

    ready: Ready | None = None
    status: int = 200
    body: bytes | None = None
    old_shape: bool = False
    delay: float = 0.0
    stored: bool = True
    cut: bool = False
    unread: bool = False
    then_refuse: float = 0.0


@dataclass(slots=True)
class SyncRecord:
    """One sync call. Times are `time.monotonic()`; `finished_at` is None while it runs.

    It is finished when the answer was sent, cut or left unsent, or the caller gave up.
    """

    received_at: float
    timestamps: tuple[float, ...]
    answer: Answer
    finished_at: float | None = None


class FakeController(Server):
    """Answers `POST /controller/load_balancer_sync` as SkyServe's controller does.

    `set_ready` sets what it lists as ready, nothing at first. `answer_next` and `answer_always`
    script how it answers. `syncs` holds a SyncRecord for each call, `arrivals` every timestamp
    it stored, in the order of the calls. `faults` holds what a caller did wrong: another
    endpoint, a body that is no report, timestamps that are not sorted (the real autoscaler
    trims its window by bisection). Such a call is answered 4xx and nothing of it is stored.
    """

    def __init__(self, ready: Ready = (), *, port: int = 0) -> None:
        super().__init__(port=port)
        self.syncs: list[SyncRecord] = []
        self.arrivals: list[float] = []
        self.faults: list[str] = []
        self._script = Script(Answer())
        self._ready = ready

    def __repr__(self) -> str:
        return f"<FakeController on port {self.port}: {len(self.syncs)} syncs>"

    def set_ready(self, ready: Ready) -> None:
        """List these replicas as ready from now on: URLs, or a map of URLs to accelerators."""
        self._ready = ready

    def answer_next(self, *answers: Answer) -> None:
        """Use each of these for one of the next syncs, in order."""
        self._script.then(*answers)

    def answer_always(self, *answers: Answer) -> None:
        """Use these, in turn, for all syncs that `answer_next` leaves; none: plain answers."""
        self._script.always(*answers)

    def wait_for_sync(self, count: int | None = None, timeout: float = 10.0) -> SyncRecord:
        """Block until so many syncs in all are finished; return the one that made it so many.

        Without a count: one that begins after this call. The caller has the answer then, but
        may not have acted on it. Raises AssertionError after `timeout` seconds.
        """
        with self._changed:
            number = len(self.syncs) + 1 if count is None else count
        self.wait_for(lambda: len(self.syncs) >= number and self._finished(number), timeout)
        return self.syncs[number - 1]

    def _finished(self, number: int) -> bool:
        return all(record.finished_at is not None for record in self.syncs[:number])

    async def _serve(self, connection: Connection) -> None:
        try:
            while await self._take_call(connection, await read_head(connection)):
                pass
        except BadRequestError as error:
            self.faults.append(str(error))
            self._tell()
            await connection.send(response(400, b"", [CLOSE]))

    async def _take_call(self, connection: Connection, head: RequestHead) -> bool:
        """Answer one call; return whether the connection may serve another."""
        if (head.method, head.target) != ("POST", SYNC_PATH.encode("ascii")):
            raise BadRequestError(f"not the sync call: {head.method} {head.target!r}")
        record = SyncRecord(time.monotonic(), (), self._script.take())
        if not record.answer.unread:
            body = b"".join([piece async for piece in read_body(connection, head)])
            record.timestamps = _timestamps(body)
            if record.answer.stored:
                self.arrivals.extend(record.timestamps)
        self.syncs.append(record)
        self._tell()
        try:
            reusable = await self._send_answer(connection, record.answer)
        finally:
            record.finished_at = time.monotonic()
            self._tell()
        if record.answer.then_refuse:
            await self._refuse_for(connection, record.answer.then_refuse)
        return reusable and not head.wants_close and not record.answer.then_refuse

    async def _send_answer(self, connection: Connection, answer: Answer) -> bool:
        if answer.unread:
            connection.reset_on_close()
            return False
        await connection.wait(None if answer.delay == math.inf else answer.delay)
        whole = response(answer.status, self._body(answer), [JSON])
        if answer.cut:
            whole = whole[:-5]
        await connection.send(whole)
        return not answer.cut

    def _body(self, answer: Answer) -> bytes:
        if answer.body is not None:
            return answer.body
        if answer.status != 200:
            return b'{"detail": "scripted"}'
        return _encode(self._ready if answer.ready is None else answer.ready, answer.old_shape)

    async def _refuse_for(self, connection: Connection, seconds: float) -> None:
        await self._stop_listening()
        connection.close()
        await asyncio.sleep(seconds)
        await self._listen(BACKLOG)


def _encode(ready: Ready, old_shape: bool) -> bytes:
    accelerators = ready if isinstance(ready, Mapping) else dict.fromkeys(ready)
    if old_shape:
        return json.dumps({"ready_replica_urls": list(accelerators)}).encode("utf-8")
    info = {
        url: {"gpu_type": accelerator or UNKNOWN_ACCELERATOR}
        for url, accelerator in accelerators.items()
    }
    return json.dumps({"replica_info": info}).encode("utf-8")


def _timestamps(body: bytes) -> tuple[float, ...]:
    """Read a sync call's report. Raises BadRequestError for what the autoscaler cannot use."""
    try:
        timestamps = json.loads(body)["request_aggregator"]["timestamps"]
        usable = all(type(item) in (int, float) and math.isfinite(item) for item in timestamps)
    except (ValueError, LookupError, TypeError):
        usable = False
    if not usable:
        raise BadRequestError("the body of a sync call is no report of timestamps")
    if any(later < earlier for earlier, later in itertools.pairwise(timestamps)):
        raise BadRequestError("the timestamps of a sync call are not sorted")
    return tuple(timestamps)
