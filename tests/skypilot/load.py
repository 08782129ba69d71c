"""An open-loop load: requests leave on their own clock, however slow the answers are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Request:
    """One request: ``outcome`` is the status, ``hung`` (client time-out) or the client's error."""

    start: float  # unix seconds
    outcome: str
    seconds: float


class Load:
    """``rate`` requests a second to ``url``."""

    def __init__(self, url: str, through: str, rate: float, client_timeout: float) -> None:
        self.requests: list[Request] = []
        self._url = url
        self._headers = {"X-Through": through}
        self._rate = rate
        self._timeout = aiohttp.ClientTimeout(total=client_timeout)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @contextlib.contextmanager
    def run(self) -> Iterator[Load]:
        """Send until the block ends, then wait for the last answers."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)

    def longest_outage(self) -> float:
        """The longest time in seconds without a successful answer, by the requests' starts."""
        good = sorted(r.start for r in self.requests if r.outcome == "200")
        edges = [min(r.start for r in self.requests), *good, max(r.start for r in self.requests)]
        return max(later - earlier for earlier, later in itertools.pairwise(edges))

    async def _run(self) -> None:
        # Kept alive for a second only: a longer pause could meet a server that hangs up first.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            begin, tasks = time.monotonic(), []
            while not self._stop.is_set():
                tasks.append(asyncio.create_task(self._one(session)))
                next_one = begin + len(tasks) / self._rate
                await asyncio.sleep(max(0.0, next_one - time.monotonic()))
            await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        start, began = time.time(), time.monotonic()
        try:
            # A POST, as inference is: its body is what the stock balancer loses between tries.
            async with session.post(
                self._url, headers=self._headers, data=b"{}", timeout=self._timeout
            ) as response:
                await response.read()
                outcome = str(response.status)
        except asyncio.TimeoutError:
            outcome = "hung"
        except (aiohttp.ClientError, OSError) as error:
            outcome = type(error).__name__
        self.requests.append(Request(start, outcome, time.monotonic() - began))
