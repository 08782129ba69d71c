"""Fixtures for the tests that run a real SkyPilot. Every test in this folder is marked so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

import environment
from service import Service

# Seconds; the first test waits for an environment to be made.
LONGEST = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skypilot",
        choices=environment.VERSIONS,
        default=environment.VERSIONS[0],
        help="the SkyPilot release to test with (default: %(default)s)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skypilot)
            item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.fixture(scope="session")
def sky_version(pytestconfig: pytest.Config) -> str:
    # Without this folder on the command line pytest does not know the option.
    return str(pytestconfig.getoption("skypilot", environment.VERSIONS[0]))


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Show a line of progress although pytest captures output."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[skypilot] {line}", flush=True)

    return show


@pytest.fixture(scope="session")
def stock_python(sky_version: str, say: Callable[[str], None]) -> Path:
    """Python of an environment with SkyPilot and nothing of ours."""
    return environment.plain_environment(sky_version, say)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def wheel_python(sky_version: str, wheel: Path, say: Callable[[str], None]) -> Path:
    """Python of an environment with SkyPilot and this tree's wheel, installed by pip alone."""
    return environment.wheel_environment(sky_version, wheel, say)


@pytest.fixture
def stock_service(stock_python: Path, tmp_path: Path) -> Service:
    """The real controller as SkyPilot ships it; ``with stock_service.run():`` starts it."""
    return Service(stock_python, tmp_path / "home")
