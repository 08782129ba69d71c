"""The status page in a real browser.

A screenshot of each view is left in pytest's folder for the run, as `status-page/*.png`:
/tmp/pytest-of-USER/pytest-current, or what `pytest --basetemp=DIR` names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from controller_client.testing import FakeController, ReplicaFactory, reset
from tests.net.browser import CHROMIUM, DRIVER, Browser
from tests.net.canned import CannedAdmin, address_of, busy_ticks, replica, snapshot
from tests.net.conftest import StartBalancer
from tests.net.harness import RunningBalancer

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium with an empty profile; skips where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def url_of(balancer: RunningBalancer) -> str:
    return f"http://127.0.0.1:{balancer.admin[1]}"


def rows(browser: Browser, table: str = "replicas") -> list[str]:
    found = browser.js(f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.innerText)")
    return [" ".join(each.split()) for each in found]


def busy() -> CannedAdmin:
    """A balancer in the middle of everything."""
    now = time.time()
    return CannedAdmin(
        snapshot(
            replica(
                "10.0.0.1:8000",
                since=now - 7300,
                accelerator="A100-80GB",
                in_flight=12,
                finished=8123,
                failed=3,
            ),
            replica(
                "10.0.0.2:8000",
                since=now - 7300,
                accelerator="A100-80GB",
                in_flight=11,
                finished=8050,
            ),
            replica(
                "10.0.0.3:8000",
                since=now - 130,
                accelerator="L4",
                finished=912,
                failed=88,
                ejected=True,
                ejected_until=now + 300,
                failures=3,
            ),
            replica(
                "replica-with-a-long-name-of-a-cloud.eu-west-1.compute.internal:8000",
                since=now - 45,
                state="draining",
                in_flight=1,
                finished=410,
            ),
            in_flight=24,
            oldest_seconds=42.0,
            ticks=busy_ticks(now),
            events=[
                {
                    "at": now - 90,
                    "level": "info",
                    "event": "replica.added",
                    "fields": {"replica": "10.0.0.3:8000"},
                },
                {
                    "at": now - 20,
                    "level": "warning",
                    "event": "list.held",
                    "fields": {"replicas": "3"},
                },
                {
                    "at": now - 10,
                    "level": "error",
                    "event": "tls.reload_failed",
                    "fields": {"cause": "x" * 200},
                },
            ],
        )
    )


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("light", 1280, False),
        ("dark", 1280, True),
        ("tablet", 800, False),
        ("small-screen", 1080, True),
        ("phone-light", 360, False),
        ("phone-dark", 360, True),
    ],
)
def test_it_looks_well(
    name: str, width: int, dark: bool, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with busy() as url:
        browser.get(url, width=width, dark=dark)
        browser.wait_for("#link", "Live")
        assert browser.text("h1") == "chat"
        assert browser.text("#state") == "Ready"
        assert len(rows(browser)) == 4
        needed = browser.js("document.documentElement.scrollWidth")
        background = browser.js("getComputedStyle(document.body).backgroundColor")
        folder = tmp_path_factory.getbasetemp() / "status-page"
        folder.mkdir(exist_ok=True)
        browser.screenshot(folder / f"{name}.png")
        assert browser.errors() == []
        asked = browser.requests()
    assert needed <= width
    assert background == ("rgb(16, 20, 24)" if dark else "rgb(246, 247, 249)")
    assert f"{url}/events" in asked
    assert all(each.startswith(f"{url}/") for each in asked), asked
    assert (folder / f"{name}.png").stat().st_size > 10_000


def test_what_it_says(browser: Browser) -> None:
    with busy() as url:
        browser.get(url)
        browser.wait_for("#link", "Live")
        facts = browser.text("#facts")
        assert "Replicas 3 routable 3 serving · 1 draining · 1 ejected" in facts
        assert "Sync with the controller ok, " in facts
        assert "List held no grace period 30 s" in facts
        assert "Policy least_load no sticky sessions" in facts
        assert "In flight 24 oldest 42 s" in facts
        first, second, third, _ = rows(browser)
        assert first.startswith(
            "10.0.0.1:8000 serving A100-80GB 12 8,123 46.4 % 3 (<0.1 %) 2 h 1 min ago"
        )
        assert second.startswith("10.0.0.2:8000 serving A100-80GB 11 8,050 46.0 % 0 ")
        assert third.startswith(
            "10.0.0.3:8000 serving ejected 3 failures in a row, tried again in "
        )
        assert "L4 0 912 5.2 % 88 (9.6 %) 2 min 1" in third
        assert [each.split(" ", 1)[1] for each in rows(browser, "events")] == [
            "error tls.reload_failed cause " + "x" * 200,
            "warning list.held replicas 3",
            "replica.added replica 10.0.0.3:8000",
        ]
        drawn = browser.js(
            "[...document.querySelectorAll('.area path')].map(p => p.getAttribute('d').length)"
        )
        assert len(drawn) == 10
        assert min(drawn) > 1000
        label = browser.js("document.querySelector('.area svg').getAttribute('aria-label')")
        assert label.startswith("Requests a second, now: answered ")


def test_its_plots_can_be_read_with_the_keyboard(browser: Browser) -> None:
    with busy() as url:
        browser.get(url)
        browser.wait_for("#link", "Live")
        browser.driver.execute_script("document.querySelector('.area svg').focus()")
        assert browser.text("#cursor") == ""
        seen = []
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
            browser.press(key)
            seen.append(browser.text("#cursor"))
        assert seen[0] == seen[2] != seen[1]
        assert all(each.startswith("at ") for each in seen)
        assert seen[0] in browser.js("document.activeElement.getAttribute('aria-label')")
        browser.press("Escape")
        assert browser.text("#cursor") == ""


def test_it_follows_what_happens(
    browser: Browser,
    fake_controller: FakeController,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, service_name="llama", grace_period="60s")
    browser.get(url_of(balancer))
    browser.wait_for("#facts", "1 routable")
    assert browser.text("h1") == "llama"
    # Added.
    fake_controller.set_ready([a.url, b.url])
    browser.wait_for("#facts", "2 routable")
    # Ejected, after it has reset a request.
    a.behave_always(reset())
    b.behave_always(reset())
    balancer.get()
    browser.wait_for("#replicas", "ejected 1 failure in a row")
    browser.wait_for("#events", "warning replica.ejected")
    # Gone from the list; then the list is empty, and held.
    fake_controller.set_ready([b.url])
    browser.wait_for("#replicas", "draining")
    fake_controller.set_ready([])
    browser.wait_for("#facts", "List held held for ")
    # The controller fails.
    fake_controller.refuse()
    browser.wait_for("#facts", "Sync with the controller failing for ")
    # Draining.
    with balancer.client() as busy:
        busy.send(b"GET / HTTP/1.1\r\n")
        balancer.call(balancer.balancer.drain)
        browser.wait_for("#state", "Draining")
        assert browser.errors() == []  # before the end of the drain breaks the page's stream


def test_it_says_when_the_balancer_is_gone_and_comes_back_by_itself(browser: Browser) -> None:
    with CannedAdmin(snapshot()) as url:
        browser.get(url)
        browser.wait_for("#link", "Live")
    browser.wait_for("#link", "The balancer cannot be reached since ")
    assert browser.driver.title.startswith("cannot be reached")
    assert browser.js("document.body.classList.contains('stale')")
    changed = snapshot(replica("10.0.0.9:8000"))
    with CannedAdmin(changed, port=address_of(url)[1]):
        browser.wait_for("#replicas", "10.0.0.9:8000")
        assert browser.text("#link") == "Live"
        assert browser.driver.title == "chat: ready · skyserve-lb"


def test_where_it_is_not_fed_it_asks(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lb.live.MAX_LISTENERS", 0)
    with CannedAdmin(snapshot()) as url:
        browser.get(url)
        browser.wait_for("#link", "Not live, read every 5 s")
        assert browser.text("#state") == "Ready"


def test_nothing_that_came_from_outside_becomes_markup(browser: Browser) -> None:
    now = time.time()
    evil = snapshot(
        replica(EVIL, accelerator=EVIL, ejected=True, ejected_until=now, state="serving"),
        not_ready=EVIL,
        events=[{"at": now, "level": EVIL, "event": EVIL, "fields": {EVIL: EVIL}}],
    )
    evil["about"] = {**evil["about"], "service": EVIL, "policy": EVIL, "sticky": EVIL, "mode": EVIL}
    evil["sync"] = {**evil["sync"], "failing_since": now, "result": EVIL, "cause": EVIL}
    with CannedAdmin(evil) as url:
        browser.get(url, width=360)
        browser.wait_for("#link", "Live")
        assert browser.text("h1") == EVIL
        assert EVIL in browser.text("#replicas tbody th")
        assert browser.text("#events").count(EVIL) == 4
        assert browser.js("document.querySelectorAll('img, script:not([src])').length") == 0
        assert browser.js("document.documentElement.scrollWidth") <= 360
        assert browser.errors() == []
        assert all(each.startswith(f"{url}/") for each in browser.requests())


def test_a_page_that_nobody_sees_is_not_fed(browser: Browser) -> None:
    with CannedAdmin(snapshot()) as url:
        browser.get(url)
        browser.wait_for("#link", "Live")
        browser.driver.execute_script(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        assert browser.js("source.readyState") == 2
        browser.driver.execute_script(
            "Object.defineProperty(document, 'hidden', {value: false});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        assert browser.js("source.readyState") < 2
