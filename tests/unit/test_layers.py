"""The layers: who may import what, read off the syntax trees of all our modules."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PURE = {
    "lb",
    "lb.arrivals",
    "lb.chunks",
    "lb.errors",
    "lb.events",
    "lb.frames",
    "lb.headers",
    "lb.history",
    "lb.kinds",
    "lb.policies",
    "lb.ranking",
    "lb.replay",
    "lb.replicas",
    "lb.retry",
    "lb.settings",
    "lb.snapshot",
    "lb.stickiness",
    "controller_client",
    "controller_client.embedded",
    "controller_client.embedded.task",
    "controller_client.embedded.versions",
    "controller_client.errors",
    "controller_client.protocol",
}
# All that pure modules may import beside each other: no clock, no logger, no loop, nothing that
# opens anything. A random generator is passed in.
NO_IO = {
    "__future__",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "http.HTTPStatus",
    "ipaddress",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "typing",
    "urllib.parse",
    "yaml",
}


@dataclass(frozen=True)
class Import:
    """One imported name in full: a module, or something in one."""

    line: int
    name: str
    at_import_time: bool

    def within(self, *modules: str) -> bool:
        return any(f"{self.name}.".startswith(f"{module}.") for module in modules)


@dataclass(frozen=True)
class Module:
    path: str
    name: str
    imports: tuple[Import, ...]
    claims_to_be_pure: bool


def read(path: str, source: str) -> Module:
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    tree = ast.parse(source)
    claim = re.search(r"\bPure\b", ast.get_docstring(tree) or "")
    imports = imports_in(tree, package, at_import_time=True)
    return Module(path, name, tuple(imports), claims_to_be_pure=claim is not None)


def imports_in(node: ast.AST, package: str, *, at_import_time: bool) -> Iterator[Import]:
    """All imports in a module or statement; those for type checkers alone do not run at import time."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = "" if isinstance(node, ast.Import) else f"{base_of(node, package)}."
        for alias in node.names:
            yield Import(node.lineno, base + alias.name, at_import_time)
        return
    in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            runs = not in_function and not (for_types and child in getattr(node, "body", []))
            yield from imports_in(child, package, at_import_time=at_import_time and runs)


def base_of(node: ast.ImportFrom, package: str) -> str:
    """The module that `from ... import` takes from, relative ones (`.`, `..x`) too."""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join([*base, node.module] if node.module else base)


def breaches(*modules: Module) -> list[str]:
    """A line for each breach: file, line and rule."""
    return [f"{module.path}:{line}: {rule}" for module in modules for line, rule in judge(module)]


def judge(module: Module) -> Iterator[tuple[int, str]]:
    # The demo stands on top of all: what it calls pure may still name the types of what it starts.
    in_demo = module.name.startswith("lb.demo.")
    if module.claims_to_be_pure and module.name not in PURE and not in_demo:
        yield 1, "it says that it is pure, and is not in PURE here"
    for each in module.imports:
        target = module_of(each.name)
        if module.name in PURE and not (target in PURE or each.within(*NO_IO)):
            yield each.line, f"a pure module imports no {each.name}"
        if (module.name, target) in {("lb.proxy", "lb.syncer"), ("lb.syncer", "lb.proxy")}:
            yield each.line, "proxy and syncer do not know each other"
        if re.search(r"^aiohttp\b.*parser", each.name, re.IGNORECASE) and module.name != "lb.wire":
            yield each.line, "only lb.wire imports aiohttp's parsers"
        if each.within("httpx") and module.name != "controller_client.client":
            yield each.line, "only controller_client.client imports httpx"
        early = each.at_import_time
        if module.name.startswith("controller_client") and each.within("lb") and early:
            yield each.line, "controller_client imports lb within functions only"
        if module.name == "lb.cli" and target and target not in PURE and early:
            yield each.line, "lb.cli imports what it starts within functions only"
    both = {module_of(each.name): each.line for each in module.imports}
    if {"lb.proxy", "lb.syncer"} <= both.keys() and module.name != "lb.app":
        yield max(both["lb.proxy"], both["lb.syncer"]), "only lb.app joins proxy and syncer"


def module_of(name: str) -> str | None:
    """Our module that an imported name is, or is in."""
    while name and name not in OURS:
        name = name.rpartition(".")[0]
    return name or None


MODULES = [
    read(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    for package in ("lb", "controller_client")
    for path in sorted((ROOT / package).rglob("*.py"))
]
OURS = {module.name for module in MODULES}


def test_the_layers_hold() -> None:
    assert breaches(*MODULES) == []


@pytest.mark.parametrize("top", ["lb.proxy", "lb.syncer"])
def test_nothing_below_proxy_and_syncer_leads_back_up(top: str) -> None:
    below, new = set[str](), {top}
    while new:
        imported = {module_of(i.name) for m in MODULES if m.name in new for i in m.imports}
        new = {name for name in imported if name} - below
        below |= new
    assert not below & {"lb.proxy", "lb.syncer", "lb.app", "lb.cli"}
    assert "lb.replicas" in below


def test_every_module_that_a_rule_names_exists() -> None:
    named = {"lb.proxy", "lb.syncer", "lb.app", "lb.wire", "lb.cli", "controller_client.client"}
    assert PURE | named <= OURS


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("lb/app.py", '"""Pure."""', ":1: it says that it is pure, and is not in PURE here"),
        ("lb/retry.py", "import re\nimport time\n", ":2: a pure module imports no time"),
        ("lb/retry.py", "from asyncio import sleep", ":1: a pure module imports no asyncio.sleep"),
        ("lb/retry.py", "from http import client", ":1: a pure module imports no http.client"),
        ("lb/retry.py", "import urllib.request", ":1: a pure module imports no urllib.request"),
        ("lb/retry.py", "import lb.proxy", ":1: a pure module imports no lb.proxy"),
        ("lb/retry.py", "from lb import logs", ":1: a pure module imports no lb.logs"),
        ("lb/retry.py", "from .logs import Log", ":1: a pure module imports no lb.logs.Log"),
        ("lb/retry.py", "from . import logs", ":1: a pure module imports no lb.logs"),
        ("lb/__init__.py", "from .app import run", ":1: a pure module imports no lb.app.run"),
        ("lb/retry.py", "def f():\n import ssl", ":2: a pure module imports no ssl"),
        ("controller_client/protocol.py", "import anyio", ":1: a pure module imports no anyio"),
        (
            "lb/proxy.py",
            "from lb.syncer import Syncer",
            ":1: proxy and syncer do not know each other",
        ),
        (
            "lb/syncer.py",
            "def f():\n from lb import proxy",
            ":2: proxy and syncer do not know each other",
        ),
        (
            "lb/admin.py",
            "import lb.syncer\nfrom lb.proxy import Proxy",
            ":2: only lb.app joins proxy and syncer",
        ),
        (
            "lb/server.py",
            "from aiohttp.http import HttpRequestParser",
            ":1: only lb.wire imports aiohttp's parsers",
        ),
        (
            "lb/server.py",
            "import aiohttp.http_parser",
            ":1: only lb.wire imports aiohttp's parsers",
        ),
        ("lb/app.py", "import httpx", ":1: only controller_client.client imports httpx"),
        (
            "controller_client/testing.py",
            "try:\n from lb import app\nexcept ImportError:\n pass",
            ":2: controller_client imports lb within functions only",
        ),
        (
            "lb/cli.py",
            "from lb.app import run",
            ":1: lb.cli imports what it starts within functions only",
        ),
        (
            "lb/cli.py",
            "import controller_client.client",
            ":1: lb.cli imports what it starts within functions only",
        ),
    ],
)
def test_a_breach_is_caught(path: str, source: str, breach: str) -> None:
    assert breaches(read(path, source)) == [path + breach]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "lb/retry.py",
            "import random\nfrom collections.abc import Set\nfrom lb import __version__",
        ),
        ("lb/admin.py", "import time\nfrom lb.proxy import Proxy\nfrom lb.retry import MAX_SENDS"),
        ("lb/cli.py", "from lb.settings import load\ndef serve():\n from lb.app import run"),
        ("controller_client/testing.py", "async def f():\n from lb import app"),
        ("controller_client/testing.py", "if TYPE_CHECKING:\n import lb.app\nelse:\n import os"),
        ("controller_client/testing.py", "import lbx"),
    ],
)
def test_what_is_allowed_is_let_be(path: str, source: str) -> None:
    assert breaches(read(path, source)) == []
