"""`deploy/Dockerfile`, played without an engine, and what a container of it would run.

The steps are done for real (see `tests/deploy/dockerfile.py`): they need the package index, as the
image's build does. The container's user can read everything here and write nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller_client.testing import FakeController, ReplicaFactory
from lb import __version__
from tests.deploy.dockerfile import DOCKERFILE, Image, build, stages
from tests.net.harness import LogLines, RawClient, request
from tests.system.test_serve import free_pair

UID = 65532
NEVER_SECONDS = 30


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    # Not pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="skyserve-lb-image-") as folder:
        Path(folder).chmod(0o755)
        made = build(Path(folder))
        if os.geteuid() != 0:  # then the files are ours: we are the container's user
            subprocess.run(("chmod", "-R", "a-w", str(made.root)), check=True)
        yield made
        subprocess.run(("chmod", "-R", "u+w", str(made.root)), check=True)


class Container:
    """The image's command as its user, with an empty environment but for the image's own."""

    def __init__(self, image: Image, **variables: str) -> None:
        path = image.inside(image.environment["PATH"]).replace("$PATH", os.environ["PATH"])
        self._image = image
        # As an engine does for a user of no account.
        self.environment = image.environment | {"PATH": path, "HOME": "/"} | variables
        self.process = self._start(*image.entrypoint, *image.command)
        self.log = LogLines()

    def _start(self, *command: str) -> subprocess.Popen[str]:
        as_user: tuple[str, ...] = ()
        if os.geteuid() == 0:
            assert self._image.user == f"{UID}:{UID}"
            # To read, not to write: the tests' Python may be in a home that others cannot enter.
            as_user = (
                *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
                *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
            )
        return subprocess.Popen(
            (*as_user, *map(self._image.inside, command)),
            cwd=self._image.workdir,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Container:
        assert self.process.stdout is not None
        while not self.log.named("replica.added"):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            self.log.write(line)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def health(self) -> int:
        """The exit code of the health check."""
        check = self._start(*self._image.healthcheck)
        check.communicate(timeout=NEVER_SECONDS)
        return check.returncode


def test_the_image_is_what_it_says() -> None:
    every = stages(DOCKERFILE.read_text())
    bases = {steps[0][1].partition(" ")[0] for steps in every.values()}
    assert bases == {"python:3.13-slim-trixie"}, "one Python, to the minor version, in both stages"
    final = [keyword for keyword, _ in every[""]]
    assert "RUN" not in final, "what builds stays behind"
    assert final.count("ENTRYPOINT") == final.count("HEALTHCHECK") == 1


def test_what_a_container_is_run_with(image: Image) -> None:
    assert image.user == f"{UID}:{UID}"
    assert (image.entrypoint, image.command) == (("skyserve-lb",), ("serve",))
    assert image.stop_signal == "SIGTERM"
    assert image.exposed == (8080, 9080)
    assert (
        image.labels.items()
        >= {
            "org.opencontainers.image.title": "skyserve-lb",
            "org.opencontainers.image.version": __version__,
            "org.opencontainers.image.licenses": "Apache-2.0",
        }.items()
    )


def test_the_wheel_alone_is_in_it(image: Image) -> None:
    assert sorted(path.name for path in image.root.iterdir()) == ["opt"]
    (packages,) = image.root.glob("opt/skyserve-lb/lib/python3.*/site-packages")
    names = {path.name.partition("-")[0] for path in packages.iterdir()}
    assert names >= {"lb", "controller_client", "aiohttp", "uvloop"}
    assert not names & {"pip", "setuptools", "hatchling", "wheel", "pytest", "tests"}
    assert (packages / "lb" / "page" / "index.html").is_file()
    assert list(packages.glob("skyserve_lb-*.dist-info/licenses/LICENSE"))


def test_it_serves_is_healthy_and_drains(
    image: Image, fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    replica = replica_factory("a")
    fake_controller.set_ready([replica.url])
    port = free_pair()
    before = files_of(image)
    url = fake_controller.url
    with Container(image, SKYSERVE_LB_CONTROLLER_URL=url, SKYSERVE_LB_PORT=str(port)) as container:
        with RawClient(("127.0.0.1", port)) as client:
            assert client.ask(request()).body == b"a"
        assert container.health() == 0
        # No answer at all is as bad as a wrong one.
        container.process.send_signal(signal.SIGSTOP)
        assert container.health() == 1
        container.process.send_signal(signal.SIGCONT)
        # It looks where the variables say that the admin port is.
        container.environment["SKYSERVE_LB_ADMIN_PORT"] = "1"
        assert container.health() == 1
        container.process.send_signal(getattr(signal, image.stop_signal))
        _, errors = container.process.communicate(timeout=NEVER_SECONDS)
        assert (container.process.returncode, errors) == (0, "")
        del container.environment["SKYSERVE_LB_ADMIN_PORT"]
        assert container.health() == 1
    assert files_of(image) == before, "it wrote into the image"


def files_of(image: Image) -> list[Path]:
    return sorted(image.root.rglob("*"))


def test_bad_configuration_is_one_line(image: Image) -> None:
    container = Container(image)
    output, errors = container.process.communicate(timeout=NEVER_SECONDS)
    assert (container.process.returncode, output) == (2, "")
    assert errors.startswith("skyserve-lb: --controller-url")
    assert len(errors.splitlines()) == 1
