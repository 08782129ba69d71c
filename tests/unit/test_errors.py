"""The error tree: what each kind says of the status, of another attempt, and of the replica."""

from typing import get_args

import pytest

from lb import errors
from lb.errors import (
    AttemptError,
    BadRequest,
    BadResponse,
    ConnectFailed,
    LostBeforeResponse,
    ProxyError,
    Rejected,
    Resend,
    ResponseCut,
    StaleConnection,
    StartError,
    TimedOut,
    UpstreamReason,
)


@pytest.mark.parametrize(
    ("error", "status", "reason", "resend", "ejects"),
    [
        (ConnectFailed("connect_refused", "x"), 502, "connect_refused", Resend.ALWAYS, True),
        (ConnectFailed("connect_timeout", "x"), 502, "connect_timeout", Resend.ALWAYS, True),
        (StaleConnection("x"), 502, "reset", Resend.ALWAYS, False),
        (LostBeforeResponse("x"), 502, "reset", Resend.BY_POLICY, True),
        (BadResponse("truncated", "x"), 502, "truncated", Resend.NEVER, False),
        (BadResponse("protocol", "x"), 502, "protocol", Resend.NEVER, False),
        (TimedOut("x"), 504, "timeout", Resend.NEVER, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AttemptError) else None,
)
def test_a_failed_attempt(
    error: AttemptError, status: int, reason: UpstreamReason, resend: Resend, ejects: bool
) -> None:
    assert (error.status, error.reason, error.resend, error.ejects) == (
        status,
        reason,
        resend,
        ejects,
    )
    assert str(error) == error.detail == "x"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectFailed, "connect_error"),
        (StaleConnection, "stale_connection"),
        (LostBeforeResponse, "reset_before_response"),
    ],
)
def test_what_is_sent_again_is_counted_by_its_reason(
    error: type[AttemptError], reason: str
) -> None:
    assert error.resend is not Resend.NEVER
    assert error.retry_reason == reason


def test_there_are_five_kinds_of_failed_attempt_and_none_is_resent_by_default() -> None:
    assert {error.__name__ for error in AttemptError.__subclasses__()} == {
        "ConnectFailed",
        "StaleConnection",
        "LostBeforeResponse",
        "BadResponse",
        "TimedOut",
    }
    assert AttemptError.resend is Resend.NEVER
    assert not AttemptError.ejects


def test_a_bad_request_is_400_unless_it_is_more_special() -> None:
    assert BadRequest("x").status == 400
    assert BadRequest("x", status=431).status == 431
    assert BadRequest("x").status == 400  # the other one's status is its own


def test_a_refusal_of_ours_is_503_with_a_time_to_come_back() -> None:
    error = Rejected("no_replicas", "No ready replicas.", retry_after=2)
    assert (error.status, error.reason, error.retry_after) == (503, "no_replicas", 2)
    assert Rejected("overload", "x").retry_after == 1


def test_an_unknown_fault_is_500() -> None:
    error = ProxyError("x")
    assert (error.status, error.detail) == (500, "x")


def test_a_cut_answer_has_no_status_it_is_past_the_commit_point() -> None:
    error = ResponseCut("truncated", "a: it closed the connection")
    assert (error.reason, error.detail, str(error)) == (
        "truncated",
        "a: it closed the connection",
        "a: it closed the connection",
    )
    assert not isinstance(error, ProxyError)
    assert not hasattr(error, "status")


def test_reasons_are_the_labels_of_the_metrics() -> None:
    assert get_args(errors.UpstreamReason) == (
        "connect_refused",
        "connect_timeout",
        "dns",
        "tls",
        "reset",
        "timeout",
        "protocol",
        "truncated",
    )
    assert get_args(errors.RetryReason) == (
        "connect_error",
        "stale_connection",
        "reset_before_response",
    )
    assert get_args(errors.RejectReason) == (
        "not_synced",
        "no_replicas",
        "all_ejected",
        "overload",
        "queue_timeout",
        "shutting_down",
        "body_too_large",
        "bad_request",
    )


def test_a_balancer_that_cannot_start_says_why_and_how_it_ends() -> None:
    error = StartError("cannot listen on 127.0.0.1:8080", errors.EXIT_NO_PORT)
    assert (str(error), error.exit_code) == ("cannot listen on 127.0.0.1:8080", 3)
