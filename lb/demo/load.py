"""The clients: requests at a steady rate, whatever becomes of the earlier ones."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import anyio

from lb.demo.run import CLIENT_TIMEOUT, LATE, RATE, Outcome, Over, Result, Run


async def send_steadily(url: str, run: Run, over: Over) -> None:
    """Send requests to `url` and keep what becomes of them in `run`, until it is `over`.

    Ends when all have ended.
    """
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=CLIENT_TIMEOUT),
        ) as session,
        anyio.create_task_group() as requests,
    ):
        while not over(run):
            await anyio.sleep_until(run.began + run.sent / RATE)
            run.sent += 1
            requests.start_soon(_request, session, url, run)


async def _request(session: aiohttp.ClientSession, url: str, run: Run) -> None:
    sent = time.monotonic()
    try:
        # POST, as aiohttp sends a GET again by itself when its connection is lost.
        async with session.post(url + "/v1/completions", json={"prompt": "Hi"}) as response:
            await response.read()
        outcome = _judge(response.status, time.monotonic() - sent)
    except asyncio.TimeoutError:  # which is another than TimeoutError in Python 3.10
        outcome = Outcome.HUNG
    except aiohttp.ClientError:
        outcome = Outcome.FAILED
    run.results.append(Result(sent - run.began, time.monotonic() - run.began, outcome))


def _judge(status: int, seconds: float) -> Outcome:
    if status == 200:
        return Outcome.ANSWERED_LATE if seconds > LATE else Outcome.ANSWERED
    return Outcome.REFUSED if status == 503 else Outcome.FAILED
