"""The ring of events."""

from lb.events import KEPT, LONGEST_VALUE, RecentEvents
from lb.logs import Log


def test_it_keeps_the_newest() -> None:
    events = RecentEvents()
    for number in range(KEPT + 2):
        events.add(float(number), "info", "replica.added", {"replica": number})
    assert [each["at"] for each in events] == [float(number) for number in range(2, KEPT + 2)]


def test_what_one_process_kept_another_takes_over() -> None:
    worker, control = RecentEvents(), RecentEvents()
    control.add(1.0, "info", "server.started", {})
    worker.add(2.0, "warning", "replica.ejected", {"replica": "a"})
    control.extend(worker.take())
    assert [each["event"] for each in control] == ["server.started", "replica.ejected"]
    assert worker.take() == []


def test_fields_become_short_text() -> None:
    events = RecentEvents()
    fields = {"count": 3, "none": None, "entries": ["a", 1], "cause": "x" * (LONGEST_VALUE + 1)}
    events.add(1.0, "warning", "list.entry_skipped", fields)
    (event,) = events
    assert event == {
        "at": 1.0,
        "level": "warning",
        "event": "list.entry_skipped",
        "fields": {"count": "3", "entries": "a, 1", "cause": "x" * (LONGEST_VALUE - 3) + "..."},
    }
    events.add(2.0, "info", "server.started", {"address": "y" * LONGEST_VALUE})
    assert list(events)[1]["fields"]["address"] == "y" * LONGEST_VALUE


def test_the_log_keeps_its_events_but_those_of_requests_whatever_its_level() -> None:
    log = Log(log_format="json", level="error")
    log.info("replica.added", replica="a")
    log.info("request.finished", path="/secret")
    log.error("request.failed", path="/secret")
    log.warning("replica.ejected", replica="a")
    assert [(each["level"], each["event"], each["fields"]) for each in log.recent] == [
        ("info", "replica.added", {"replica": "a"}),
        ("warning", "replica.ejected", {"replica": "a"}),
    ]
