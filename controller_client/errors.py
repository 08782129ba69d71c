"""The one error of a sync call."""

from typing import Literal

SyncFailure = Literal["timeout", "connect_error", "http_error", "bad_payload"]


class SyncError(Exception):
    """One sync with the controller failed; the ready list known so far stays as it is.

    `result` is the label of the `sync_total` metric:

    - `timeout`: no whole answer within the time-out of the call;
    - `connect_error`: no connection, or one that ended before a whole answer was read;
    - `http_error`: an answer whose status is not 2xx;
    - `bad_payload`: an answer that is no ready list.

    `str(error)` is one line that names the cause. It never quotes what the controller sent.
    """

    def __init__(self, result: SyncFailure, message: str) -> None:
        super().__init__(result, message)
        self.result = result
        self.message = message

    def __str__(self) -> str:
        return self.message
