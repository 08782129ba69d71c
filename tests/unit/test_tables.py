"""The tables of `skyserve-lb status`: what they show in little room."""

import io

import pytest
from rich.console import Console

from controller_client.embedded.versions import Replica, Service, Status
from lb import tables


@pytest.mark.parametrize("width", [60, 1000])
def test_nothing_is_cut_where_there_is_little_room(width: int) -> None:
    name = "n" * 63
    replica = Replica(1, 1, Status.SHUTTING_DOWN, 0, 0, port=54321)
    service = Service(name, {1: {"service": {}}}, 1, 12345, 3, replicas=[replica])
    output = io.StringIO()
    row = tables.row(service, 60, controlled=True)
    Console(file=output, width=width).print(tables.tables([row]))
    text = output.getvalue()
    assert "…" not in text
    assert text.count("n") >= 2 * len(name)
    assert max(map(len, text.splitlines())) <= width
