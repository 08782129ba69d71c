"""A bound for the log file that SkyPilot opens once and that nothing rotates."""

import io
import os
import shutil
from pathlib import Path
from typing import TextIO

LIMIT = 10 * 1024 * 1024  # bytes
KEPT = 64 * 1024  # bytes of the end that stay in the file, for `sky serve logs --tail`


class BoundedLog(io.TextIOBase):
    """Writes through to `file`; beyond `LIMIT` all of it moves to FILE.1 but the last `KEPT`.

    The file itself stays (and is cut), since `sky serve logs` may have it open. A reader that
    follows it sees new lines again when it is run again.
    """

    def __init__(self, file: TextIO, limit: int = LIMIT, kept: int = KEPT) -> None:
        self._file = file
        self._path = Path(file.name)
        self._limit = limit
        self._kept = kept
        self._size = os.fstat(file.fileno()).st_size

    @classmethod
    def around(cls, stream: TextIO) -> TextIO:
        """`stream` itself, unless it is a regular file, which would grow for ever."""
        try:
            is_file = Path(stream.name).is_file()
        except (AttributeError, OSError, TypeError):
            return stream
        return cls(stream) if is_file else stream  # type: ignore[return-value]

    def write(self, text: str) -> int:
        """Write `text`; a rotation that fails is tried again after the next `limit` bytes."""
        self._file.write(text)
        self._size += len(text)
        if self._size > self._limit:
            self._file.flush()
            self._size = 0
            try:
                self._rotate()
            except OSError as error:
                self._file.write(f"skyserve-lb: this log cannot be rotated: {error}\n")
        return len(text)

    def _rotate(self) -> None:
        shutil.copyfile(self._path, f"{self._path}.1")
        with self._path.open("rb") as whole:
            whole.seek(-min(self._kept, whole.seek(0, os.SEEK_END)), os.SEEK_END)
            end = whole.read().partition(b"\n")[2].decode(errors="replace")
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"skyserve-lb: earlier lines are in {self._path}.1\n{end}")
        self._size = len(end)

    def flush(self) -> None:
        """Flush the file, unless it is closed: at our own end Python flushes once more."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """Never: it is a file."""
        return False
