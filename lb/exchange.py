"""What is known of one request while it runs, and its one exit: measured and logged here.

Nothing of a header's value, a query or a body is kept.
"""

from __future__ import annotations

import random
import re
import time

from lb.errors import Outcome, ProxyError, ResponseCut
from lb.headers import request_id_of
from lb.logs import Log
from lb.metrics import Metrics
from lb.request import Request
from lb.server import ClientConnection
from lb.settings import AccessLog

# A target has no fragment, by the rules; where one comes all the same, it may be a secret.
END_OF_PATH = re.compile(rb"[?#]")
# What an access log shows for a client that left before the head (nginx's number).
CLIENT_CLOSED_REQUEST = 499


class Exchange:
    """One request's record; times are seconds of the monotonic clock."""

    session: bytes | None = None  # of a sticky request; never logged
    attempts = 0
    replica = ""
    status = 0  # of the head that the client was sent: the commit point is past
    outcome: Outcome = "ok"
    reason = ""
    bytes_in = 0
    bytes_out = 0
    connect_seconds = 0.0
    waited = 0.0
    first_send: float | None = None
    first_byte: float | None = None

    def __init__(self, request: Request, client: ClientConnection) -> None:
        self.request = request
        self.client = client
        self.request_id = request_id_of(request.fields) or b"%032x" % random.getrandbits(128)

    @property
    def committed(self) -> bool:
        """Has the client been sent a response head?"""
        return self.status != 0

    def commit(self, status: int) -> None:
        """The response head goes to the client now."""
        self.status = status
        self.first_byte = time.monotonic()

    def judge_status(self) -> None:
        """A replica's answer was passed on whole: its status says whose fault it tells of."""
        if self.status >= 500:
            self.outcome = "upstream_error"
        elif self.status >= 400:
            self.outcome = "client_error"

    def failed(self, error: ProxyError | ResponseCut) -> None:
        """No answer of a replica, or not all of it."""
        self.outcome, self.reason = error.outcome, error.reason

    def left(self, *, uploading: bool) -> str:
        """The client left, with its body on the way (`uploading`) or not; the phase in which it did."""
        self.outcome, self.reason = "client_closed", "client_closed"
        if self.committed:
            return "streaming"
        self.status = CLIENT_CLOSED_REQUEST
        return "request_body" if uploading else "before_head"

    def finish(self, metrics: Metrics, log: Log, access_log: AccessLog) -> None:
        """The one exit of every request."""
        arrived = self.request.arrived
        total = time.monotonic() - arrived
        first_byte = own = None
        if self.first_byte is not None:
            first_byte = self.first_byte - arrived
        if self.first_send is not None:
            own = max(0.0, self.first_send - arrived - self.waited - self.connect_seconds)
        metrics.request_finished(
            (
                self.outcome,
                self.status,
                self.request.method,
                total,
                first_byte,
                own,
                self.bytes_in,
                self.bytes_out,
                self.replica,
            )
        )
        if access_log == "all" or (access_log == "errors" and self.outcome != "ok"):
            path = END_OF_PATH.split(self.request.target, 1)[0]
            log.info(
                "request.finished",
                request_id=self.request_id.decode(),
                client=self.client.address,
                method=self.request.method,
                path=path.decode("utf-8", "backslashreplace"),
                status=self.status,
                outcome=self.outcome,
                reason=self.reason,
                replica=self.replica,
                attempts=self.attempts,
                bytes_in=self.bytes_in,
                bytes_out=self.bytes_out,
                connect_ms=_ms(self.connect_seconds),
                ttfb_ms=None if first_byte is None else _ms(first_byte),
                total_ms=_ms(total),
            )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
