"""Environments of their own for real SkyPilot releases, made once and kept outside the tree.

A plain environment holds SkyPilot alone. A wheel environment is a copy of it (hard links, so it
costs a second) with this project's wheel installed by pip, as an operator would install it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VERSIONS = ("0.12.0", "0.14.1")
ROOT = Path(__file__).resolve().parents[2]
# Each change of the code makes one; those that no run has asked for lately go.
KEPT_SECONDS = 6 * 3600.0


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "skyserve-lb"


def plain_environment(version: str, say: Callable[[str], None] = print) -> Path:
    """The Python of an environment with ``skypilot==version`` from the package index."""
    requirement = f"skypilot=={version}"
    folder = cache_folder() / f"sky-{version}-py{_python_tag()}-{_digest(requirement.encode())}"

    def build() -> None:
        say(f"making an environment with {requirement} (once, about a minute)")
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin/python"), "-m", "pip", "install", "-q", requirement)

    return _made_once(folder, build, say)


def wheel_environment(version: str, wheel: Path, say: Callable[[str], None] = print) -> Path:
    """The Python of an environment with SkyPilot and then ``wheel``, installed by pip alone."""
    plain = plain_environment(version, say).parents[1]
    folder = plain.with_name(f"{plain.name}-wheel-{_digest(wheel.read_bytes())}")

    def build() -> None:
        shutil.copytree(plain, folder, symlinks=True, copy_function=_link)
        (folder / ".complete").unlink()
        _run(str(folder / "bin/python"), "-m", "pip", "install", "-q", str(wheel))

    python = _made_once(folder, build, say)
    _forget_unused(plain)
    return python


def build_wheel(target: Path) -> Path:
    """The wheel of this tree, built by pip with the declared build requirements."""
    _run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"),
        *("--wheel-dir", str(target), str(ROOT)),
    )
    (wheel,) = target.glob("skyserve_lb-*.whl")
    return wheel


@contextlib.contextmanager
def copy_of(python: Path) -> Iterator[Path]:
    """The Python of a copy that a test may change, beside the original for the hard links."""
    source = python.parents[1]
    folder = source.with_name(f"copy-{os.getpid()}")
    try:
        shutil.copytree(source, folder, symlinks=True, copy_function=_link)
        yield folder / "bin/python"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made_once(folder: Path, build: Callable[[], None], say: Callable[[str], None]) -> Path:
    """Build ``folder`` unless a complete one is there. What a killed run left is thrown away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    complete = folder / ".complete"
    with _locked(_lock_of(folder)):
        if not complete.exists():
            started = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            build()
            complete.touch()
            say(f"{folder.name} made in {time.monotonic() - started:.0f} s")
        os.utime(complete)
    return folder / "bin/python"


def _forget_unused(plain: Path) -> None:
    for complete in plain.parent.glob(f"{plain.name}-wheel-*/.complete"):
        if time.time() - complete.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(complete.parent, ignore_errors=True)
            _lock_of(complete.parent).unlink(missing_ok=True)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def _python_tag() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
