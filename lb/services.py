"""What `skyserve-lb up`, `update`, `status`, `logs` and `down` do. Each returns when it is done."""

import contextlib
import http.client
import json
import os
import socket
import sqlite3
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from controller_client.embedded import task
from controller_client.embedded.places import Places, free_port, start, take_down
from controller_client.embedded.store import Store
from controller_client.embedded.task import Task
from controller_client.embedded.versions import Mode, Service
from lb import tables

PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 0.1
WIDE = 1000  # columns where there is no terminal: no name or address is cut


class BadFileError(click.ClickException):
    exit_code = 2


def up(
    file: Path,
    state: Path,
    *,
    name: str | None = None,
    port: int = 0,
    gap: float = 0.0,
    options: Sequence[str] = (),
    leash: int | None = None,
) -> str:
    """Start a service; its endpoint, when that takes requests. `options` are the balancer's.

    The service ends when the other end of the descriptor `leash` is closed.
    """
    loaded = _load(file)
    name = name or loaded.config.get("name") or "service"
    if not task.NAME.fullmatch(name):
        raise click.ClickException(
            f"{name!r} is no name: up to 63 letters, digits and -_. make one"
        )
    with _opened(state) as store, Places(state, name).locked("command"):
        places = Places(state, name)
        service = Service(
            name=name,
            tasks={1: loaded.config},
            wanted=loaded.policy["min_replicas"],
            port=port or free_port(),
            admin_port=free_port(),
            options=list(options),
            gap=gap,
            born=time.time(),
        )
        try:
            store.add(service)
        except sqlite3.IntegrityError:
            way = f"change it with 'skyserve-lb update {name} FILE', or end it with 'skyserve-lb down {name}'"
            raise click.ClickException(f"there is a service {name} already: {way}") from None
        places.folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            start(places, service.born, listener, leash)
        if fault := _fault_of_balancer(store, places):
            _down(store, places)
            raise click.ClickException(f"{name} is down again: {fault}")
        endpoint: str = tables.row(service, 0, controlled=True)["endpoint"]
        return endpoint


def _fault_of_balancer(store: Store, places: Places) -> str | None:
    """Wait for the balancer; why it does not start, or None when it has."""
    for _ in _patiently():
        service = store.get(places.folder.name)
        if service is None:
            return "it was ended meanwhile"
        lines = places.balancer_log.read_text().splitlines() if places.balancer_log.exists() else []
        if any('"server.started"' in line for line in lines):
            return None
        if lines and not places.balancer(service).alive:
            return lines[-1].removeprefix("skyserve-lb: ")
    return f"nothing was heard of its load balancer within {PATIENCE_SECONDS:g} s"


def update(name: str, file: Path, state: Path, mode: Mode) -> int:
    """Update a service to what the file says; the number of the new version."""
    loaded = _load(file)
    with _opened(state) as store, _alone(store, state, name):
        with store.edit(name) as service:
            if service.ending:
                raise click.ClickException(f"{name} is being taken down")
            version = max(service.tasks) + 1
            service.tasks[version] = loaded.config
        _post(store, name, "/controller/update_service", {"version": version, "mode": mode.value})
    return version


def _post(store: Store, name: str, path: str, body: dict[str, Any]) -> None:
    """Call the controller, again and again while another takes over."""
    cause: Exception | None = None
    for _ in _patiently():
        service = store.get(name)
        assert service
        request = urllib.request.Request(
            f"http://127.0.0.1:{service.controller_port}{path}", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS):  # noqa: S310 - an address of our own
                return
        except (OSError, http.client.HTTPException) as error:
            cause = error
    raise click.ClickException(f"the controller of {name} does not take it: {cause}")


def down(name: str, state: Path) -> None:
    """End a service and all its processes, and forget it."""
    with _opened(state) as store, _alone(store, state, name) as places:
        _down(store, places)


def _down(store: Store, places: Places) -> None:
    name = places.folder.name
    with contextlib.suppress(LookupError), store.edit(name) as service:
        service.ending = True
    while store.get(name):  # the controller is at it, or there is none and we are
        with places.locked("controller", wait=False) as alone:
            if alone and (left := store.get(name)):
                take_down(store, places, left)
        time.sleep(LOOK_SECONDS)
    with places.locked("controller"):
        pass  # now it has ended too


def status(name: str | None, state: Path, *, watch: bool, as_json: bool) -> None:
    """Print the tables of one service or of all; with `watch` each second, until interrupted."""
    on_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if on_terminal else WIDE)
    over_itself = watch and on_terminal and not as_json
    live = Live(console=console, auto_refresh=False) if over_itself else None
    with _opened(state) as store, live or contextlib.nullcontext():
        while True:
            found = rows(store, state, name)
            if as_json:
                click.echo(json.dumps(found, indent=None if watch else 2))
            elif live:
                live.update(tables.tables(found), refresh=True)
            else:
                console.print(tables.tables(found))
            if not watch:
                return
            time.sleep(1)


def rows(store: Store, state: Path, name: str | None = None) -> list[dict[str, Any]]:
    """What `status --json` prints."""
    if name:
        _check_known(store, name)
    services = [store.get(each) for each in ([name] if name else store.names())]
    return [_row(state, service) for service in services if service]


def _row(state: Path, service: Service) -> dict[str, Any]:
    with Places(state, service.name).locked("controller", wait=False) as free:
        return tables.row(service, time.time(), controlled=not free)


def logs(name: str, which: str, state: Path, *, follow: bool) -> None:
    """Print the log of a replica (by its id), of the `controller` or of the `balancer`."""
    places = Places(state, name)
    with _opened(state) as store:
        _check_known(store, name)
        file = {"controller": places.controller_log, "balancer": places.balancer_log}.get(which)
        file = file or places.replica(int(which) if which.isdigit() else 0) / "log"
        if not file.exists():
            raise click.ClickException(f"{name} has no log of {which}")
        with file.open(errors="replace") as lines:
            while file.exists():
                click.echo(lines.read(), nl=False)
                if not follow:
                    return
                time.sleep(LOOK_SECONDS)


def _load(file: Path) -> Task:
    """The task in a file; what has no effect is named on stderr."""

    def find(path: str) -> str | None:
        found = Path(path).expanduser().absolute()
        return str(found) if found.exists() else None

    try:
        loaded, notes = task.parse(file.read_text(encoding="utf-8"), str(file), os.environ, find)
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from None
    except task.TaskError as error:
        raise BadFileError(str(error)) from None
    for note in notes:
        click.echo(f"skyserve-lb: {note}", err=True)
    return loaded


@contextlib.contextmanager
def _opened(state: Path) -> Iterator[Store]:
    try:
        with contextlib.closing(Store(state)) as store:
            yield store
    except BrokenPipeError:  # whoever read the output has enough of it
        raise
    except (OSError, sqlite3.Error) as error:
        file = getattr(error, "filename", None)
        if file is not None and not Path(file).is_relative_to(state):
            raise  # a program that is not there
        raise click.ClickException(f"--state-dir {state} cannot be used: {error}") from None


@contextlib.contextmanager
def _alone(store: Store, state: Path, name: str) -> Iterator[Places]:
    """The only command that is at work on this service."""
    _check_known(store, name)
    with Places(state, name).locked("command"):
        _check_known(store, name)
        yield Places(state, name)


def _check_known(store: Store, name: str) -> None:
    names = store.names()
    if name not in names:
        there = f"there are {', '.join(names)}" if names else "there is none"
        raise click.ClickException(f"no service {name}: {there}")


def _patiently() -> Iterator[None]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(LOOK_SECONDS)
