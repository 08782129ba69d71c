"""The database of services on one machine: many at once, all or nothing."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from controller_client.embedded.store import Store
from controller_client.embedded.versions import Service

TOGETHER = 4


def service(name: str) -> Service:
    return Service(name, {1: {}}, 1, 2, 3)


def test_many_may_open_it_for_the_first_time_in_one_moment(tmp_path: Path) -> None:
    """Without the lock about one in fifty attempts fails here."""
    with ThreadPoolExecutor(TOGETHER) as threads:
        for number in range(300):
            barrier = Barrier(TOGETHER)

            def open_it(_: int, number: int = number, barrier: Barrier = barrier) -> None:
                barrier.wait()
                Store(tmp_path / str(number)).close()

            list(threads.map(open_it, range(TOGETHER)))


def test_no_change_undoes_another(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.add(service("a"))

    def count(_: int) -> None:
        store = Store(tmp_path)
        for _ in range(25):
            with store.edit("a") as edited:
                edited.wanted += 1
        store.close()

    with ThreadPoolExecutor(TOGETHER) as threads:
        list(threads.map(count, range(TOGETHER)))
    found = first.get("a")
    assert found
    assert found.wanted == 1 + 25 * TOGETHER
    first.close()


def test_a_change_that_fails_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(service("a"))

    def fail() -> None:
        with store.edit("a") as edited:
            edited.wanted = 7
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert store.get("a") == service("a")
    with pytest.raises(sqlite3.IntegrityError):
        store.add(service("a"))
    store.remove("a")
    assert store.get("a") is None
    with pytest.raises(LookupError, match="there is no service a"), store.edit("a"):
        pass
    store.close()


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    Store(tmp_path / "state").close()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
