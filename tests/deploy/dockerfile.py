"""A Dockerfile played without an engine, as far as that goes.

Known are the instructions and forms that ours has; another raises. RUN and COPY are done in a folder
that stands for the file system: `/opt` and `/wheels` in commands and variables are those in it, and
the base image is the Python of the tests. The final image is left in `Image.root`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

Instruction = tuple[str, str]


def stages(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each stage by its name; the last one's name is empty."""
    found: dict[str, list[Instruction]] = {}
    arguments: dict[str, str] = {}
    name = None
    for keyword, rest in instructions(text):
        if keyword == "ARG":
            key, _, default = rest.partition("=")
            arguments[key] = default
        elif keyword == "FROM":
            name = rest.partition(" AS ")[2]
            found[name] = [("FROM", Template(rest).substitute(arguments))]
        else:
            assert name is not None, f"{keyword} before FROM"
            # What is set in no ARG, as $PATH, is left for later.
            found[name].append((keyword, Template(rest).safe_substitute(arguments)))
    return found


def instructions(text: str) -> Iterator[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, rest = line.partition(" ")
            yield keyword, rest.strip()


def pairs(text: str) -> dict[str, str]:
    """`KEY=value OTHER="a value"`, as ENV and LABEL have it."""
    return {
        key: quoted or plain for key, quoted, plain in re.findall(r'(\S+?)=(?:"(.*?)"|(\S+))', text)
    }


@dataclass
class Image:
    """What a container of the image would be run with; commands are those of the file."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    stop_signal: str = ""
    exposed: tuple[int, ...] = ()
    healthcheck: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def inside(self, text: str) -> str:
        """Its own paths in a command or a variable, as they are outside."""
        return re.sub(r"(?<![\w.])/(?=opt/|wheels)", f"{self.root}/", text)

    def play(self, keyword: str, rest: str, context: Path, stages: dict[str, Path]) -> None:
        match keyword:
            case "FROM":
                pass
            case "WORKDIR":
                self.workdir = rest
            case "COPY":
                self._copy(rest.split(), context, stages)
            case "RUN":
                self._run(rest)
            case "ENV":
                self.environment |= pairs(rest)
            case "LABEL":
                self.labels |= pairs(rest)
            case "USER":
                self.user = rest
            case "EXPOSE":
                self.exposed = tuple(map(int, rest.split()))
            case "STOPSIGNAL":
                self.stop_signal = rest
            case "HEALTHCHECK":
                self.healthcheck = tuple(json.loads(rest.partition("CMD ")[2]))
            case "ENTRYPOINT":
                self.entrypoint = tuple(json.loads(rest))
            case "CMD":
                self.command = tuple(json.loads(rest))
            case _:
                raise AssertionError(f"{keyword} is not known here")

    def _copy(self, words: list[str], context: Path, stages: dict[str, Path]) -> None:
        source = context
        if words[0].startswith("--from="):
            source = stages[words.pop(0).removeprefix("--from=")]
        *names, target = words
        there = self.root / self.workdir.lstrip("/") / target.lstrip("/")
        if target.startswith("/"):
            there = self.root / target.lstrip("/")
        for name in names:
            found = source / name.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, there, symlinks=True, dirs_exist_ok=True)
            else:
                to = there / found.name if target.endswith("/") else there
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, to)

    def _run(self, command: str) -> None:
        cwd = self.root / self.workdir.lstrip("/")
        cwd.mkdir(parents=True, exist_ok=True)
        path = f"{_python_of_the_base(self.root.parent)}:{os.environ['PATH']}"
        done = subprocess.run(
            ("sh", "-c", self.inside(command)),
            cwd=cwd,
            env={**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _python_of_the_base(folder: Path) -> Path:
    script = folder / "base" / "python"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return script.parent


def build(folder: Path) -> Image:
    """Play all stages in `folder`."""
    context = folder / "context"
    copy_context(context)
    done: dict[str, Path] = {}
    # Every stage has its turn at one path: scripts of a virtual environment name theirs.
    image = Image(folder / "image")
    for name, steps in stages(DOCKERFILE.read_text()).items():
        image = Image(folder / "image")
        image.root.mkdir()
        for keyword, rest in steps:
            image.play(keyword, rest, context, done)
        if name:
            done[name] = image.root.rename(folder / name)
    return image


def copy_context(context: Path) -> None:
    """What .dockerignore lets through."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    # Only what is let through by name is looked into: the rest may be large.
    tops = {pattern[1:].split("/")[0] for pattern in patterns if pattern.startswith("!")}
    for top in sorted(tops):
        found = ROOT / top
        for path in [found] if found.is_file() else sorted(found.rglob("*")):
            relative = path.relative_to(ROOT)
            if path.is_file() and not is_ignored(relative, patterns):
                (context / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, context / relative)


def is_ignored(path: Path, patterns: list[str]) -> bool:
    """The last pattern that names the file, or a folder that it is in, decides."""
    ignored = False
    names = [str(path), *(str(parent) for parent in path.parents if parent != Path())]
    for pattern in patterns:
        glob = pattern.removeprefix("!").replace("**/", "*")
        if any(fnmatch(name, glob) for name in names):
            ignored = not pattern.startswith("!")
    return ignored
