"""The sync call over HTTP: one httpx client. No other module imports httpx."""

import logging
import os
from collections.abc import Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy

import anyio
import httpx

from controller_client.errors import SyncError
from controller_client.protocol import SYNC_PATH, ReadyList, encode_sync, parse_sync

# A list of 10,000 replicas takes about 1 MB.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

# httpx logs every call at INFO, httpcore logs header values at DEBUG.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class ControllerClient:
    """Calls one controller's sync endpoint.

    `controller_url` is `http://host:port` or `https://host:port`. `timeout` (seconds) bounds
    a whole call, from the look-up of the name to the last byte of the answer.
    """

    def __init__(self, controller_url: str, *, timeout: float = 15.0) -> None:
        self._url = controller_url.rstrip("/") + SYNC_PATH
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            timeout=timeout,  # between two bytes; `sync` bounds the whole call
            trust_env=False,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            # A connection a call: the controller closes idle ones after 5 s, and a call that
            # meets the close fails; a new one also follows the controller to a new address.
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"Accept-Encoding": "identity", "User-Agent": "skyserve-lb"},
        )

    async def sync(self, timestamps: Sequence[float]) -> ReadyList:
        """Report these arrivals (Unix seconds) and return the ready list.

        Raises SyncError whatever goes wrong between here and the controller.
        """
        content = encode_sync(timestamps)
        try:
            with anyio.fail_after(self._timeout):
                body = await self._post(content)
        except (TimeoutError, httpx.TimeoutException):
            raise SyncError(
                "timeout", f"the controller did not answer within {self._timeout:g} s"
            ) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            raise SyncError("connect_error", "the controller's URL is no http:// URL") from None
        except httpx.RemoteProtocolError:
            raise SyncError("connect_error", "the controller sent no whole HTTP answer") from None
        except SyncError:
            raise
        # Not httpx.HTTPError alone: what lies below httpx lets through ValueError, OverflowError
        # (a port over 65535) and exception groups.
        except Exception as error:
            raise SyncError("connect_error", _described(error)) from None
        return parse_sync(body)

    async def aclose(self) -> None:
        """Close the client. A call that still runs fails."""
        await self._http.aclose()

    async def _post(self, content: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        call = self._http.stream("POST", self._url, content=content, headers=headers)
        async with call as answer:
            if not answer.is_success:
                raise SyncError("http_error", f"the controller answered {answer.status_code}")
            body = bytearray()
            # Raw, so that an answer packed against our wish cannot swell past the limit.
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise SyncError(
                        "bad_payload",
                        f"the controller's answer is longer than {MAX_ANSWER_BYTES} bytes",
                    )
            return bytes(body)


def _described(error: Exception) -> str:
    """Name the cause. httpx's own words are left out: they may quote what was received."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return f"cannot reach the controller: {_reason(cause)}"
        cause = cause.__cause__ or cause.__context__
    return f"the connection to the controller failed: {type(error).__name__}"


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__  # socket.gaierror has numbers of its own
