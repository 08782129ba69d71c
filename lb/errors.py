"""The error tree of the data path: whose fault, may it be sent again, and which status the client is told;
and why a balancer cannot start.

Pure. `lb.upstream` turns what the operating system, the TLS layer and the HTTP parser raise into
these; nothing above it sees any other kind.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal

# Of the process.
EXIT_BAD_CONFIGURATION = 2
EXIT_NO_PORT = 3

# How a request ended, and whose fault that is.
Outcome = Literal["ok", "client_error", "upstream_error", "lb_error", "client_closed"]
UpstreamReason = Literal[
    "connect_refused",
    "connect_timeout",
    "dns",
    "tls",
    "reset",
    "timeout",
    "protocol",
    "truncated",
]
RetryReason = Literal["connect_error", "stale_connection", "reset_before_response"]
# Nothing is refused for `queue_timeout` or `shutting_down`: no request queues for a connection, and who is
# connected when we drain is served. They belong to the interface of dashboards all the same.
RejectReason = Literal[
    "not_synced",
    "no_replicas",
    "all_ejected",
    "overload",
    "queue_timeout",
    "shutting_down",
    "body_too_large",
    "bad_request",
]


class Resend(Enum):
    """May the request of a failed attempt be sent again?"""

    ALWAYS = "always"  # no replica can have acted on it
    BY_POLICY = "by policy"  # it was sent and lost: `--retry` decides
    NEVER = "never"  # a part of an answer was seen


class ProxyError(Exception):
    """A request that cannot be answered by a replica; `status` and `detail` are what the client is told.

    `detail` never carries a header value, a query or a body. `outcome` says whose fault it is.
    """

    status: int = 500
    outcome: ClassVar[Outcome] = "lb_error"
    reason: str = "internal"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class BadRequest(ProxyError):
    """The client's fault: the request is malformed or asks for what a reverse proxy does not do."""

    outcome = "client_error"
    reason: RejectReason

    def __init__(self, detail: str, *, status: int = 400) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = "body_too_large" if status == 413 else "bad_request"


class Rejected(ProxyError):
    """Our own refusal: no replica was asked, or none of them could be reached."""

    status = 503
    reason: RejectReason

    def __init__(self, reason: RejectReason, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after = retry_after


class AttemptError(ProxyError):
    """One send to one replica that failed; base of the upstream side of the tree."""

    status = 502
    outcome = "upstream_error"
    reason: UpstreamReason = "protocol"
    resend: ClassVar[Resend] = Resend.NEVER
    retry_reason: ClassVar[RetryReason] = "reset_before_response"
    ejects: ClassVar[bool] = False


class ConnectFailed(AttemptError):
    """No connection could be opened, so nothing was sent."""

    resend = Resend.ALWAYS
    retry_reason = "connect_error"
    ejects = True

    def __init__(self, reason: UpstreamReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class StaleConnection(AttemptError):
    """A reused idle connection closed before any response byte.

    The replica had closed it before our request came (RFC 9112, section 9.3.1), which says nothing
    about its health.
    """

    reason = "reset"
    resend = Resend.ALWAYS
    retry_reason = "stale_connection"


class LostBeforeResponse(AttemptError):
    """The request was sent on a fresh connection, which closed before any response byte."""

    reason = "reset"
    resend = Resend.BY_POLICY
    ejects = True


class BadResponse(AttemptError):
    """The replica's answer is no HTTP, or ends within its head."""

    def __init__(self, reason: UpstreamReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TimedOut(AttemptError):
    """The wall (`--total-timeout`) was met before a response head came."""

    status = 504
    reason = "timeout"


class ResponseCut(Exception):
    """The replica's answer broke off after the commit point: the client's connection must be aborted."""

    outcome: ClassVar[Outcome] = "upstream_error"

    def __init__(self, reason: UpstreamReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class StartError(Exception):
    """The balancer cannot start; `str` is one line for the operator."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
