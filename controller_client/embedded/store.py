"""The state of all services, in SQLite: one row a service, read and written as a whole.

Each change is a transaction around reading and writing, so that none undoes another, and every
reader sees versions, replicas and active set as of one moment.
"""

import contextlib
import fcntl
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from controller_client.embedded.versions import Service

LOCK_SECONDS = 30.0


class Store:
    """The database in a folder, which is made where it is missing, for its owner alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / "state.db", timeout=LOCK_SECONDS, isolation_level=None)
        # Two that make the database in one moment would not wait for each other, as later ones do.
        with (folder / "state.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS services (name TEXT PRIMARY KEY, state TEXT NOT NULL)"
            )
        # What a power cut would lose, of processes that it ends, is worth no wait for the disk.
        self._db.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        self._db.close()

    def names(self) -> list[str]:
        return [name for (name,) in self._db.execute("SELECT name FROM services ORDER BY name")]

    def get(self, name: str) -> Service | None:
        """Raises sqlite3.DataError if another release wrote it in another form."""
        query = "SELECT state FROM services WHERE name = ?"
        row = self._db.execute(query, (name,)).fetchone()
        try:
            return Service.from_json(row[0]) if row else None
        except (LookupError, TypeError, ValueError):
            raise sqlite3.DataError(f"service {name} was written by another release") from None

    def add(self, service: Service) -> None:
        """Raises sqlite3.IntegrityError if there is one of this name."""
        query = "INSERT INTO services VALUES (?, ?)"
        self._db.execute(query, (service.name, service.to_json()))

    @contextlib.contextmanager
    def edit(self, name: str) -> Iterator[Service]:
        """The service, to be changed within the block; it is kept unless the block raises.

        Raises LookupError if there is none.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            service = self.get(name)
            if service is None:
                raise LookupError(f"there is no service {name}")
            before = service.to_json()
            yield service
            if (after := service.to_json()) != before:
                query = "UPDATE services SET state = ? WHERE name = ?"
                self._db.execute(query, (after, name))
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def remove(self, name: str) -> None:
        self._db.execute("DELETE FROM services WHERE name = ?", (name,))
