"""The command line as a process: what it prints, where, and the code it exits with."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lb.settings import OPTIONS

ROOT = Path(__file__).parents[2]
NEEDED = ("--controller-url", "http://127.0.0.1:20001", "--port", "0")

# The real command line over an `lb.app` that shows what it is given instead of serving.
OVER_A_STUB = """
import sys, types
from lb.cli import main
app = sys.modules["lb.app"] = types.ModuleType("lb.app")
def run(settings):
    {run}
app.run = run
sys.exit(main())
"""
SHOW_AND_EXIT_7 = OVER_A_STUB.format(run="print(settings); return 7")
INTERRUPT = OVER_A_STUB.format(run="raise KeyboardInterrupt")

# The real command line, with those of the slow modules on stderr that it has imported.
SHOW_IMPORTS = """
import sys
from lb.cli import main
from importlib import metadata
code = main()
slow = {"aiohttp", "asyncio", "httpx", "prometheus_client", "rich", "structlog", "uvloop"}
print("imported:", *sorted(slow & sys.modules.keys()), file=sys.stderr)
sys.exit(code)
"""


def run(
    *args: str,
    script: str | None = None,
    env: dict[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m lb` (or a script around it) with these arguments and variables."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SKYSERVE_LB_")}
    return subprocess.run(
        [sys.executable, *(("-m", "lb") if script is None else ("-c", script)), *args],
        cwd=ROOT,
        env=clean | {"COLUMNS": "200"} | (env or {}),
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=30,
        check=False,
    )


def refused(*args: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines on stderr of a run that must end as bad configuration does."""
    result = run(*args, env=env)
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("skyserve-lb: ") for line in lines)
    return [line.removeprefix("skyserve-lb: ") for line in lines]


# --- bad input --------------------------------------------------------------------------------


def test_an_unknown_flag() -> None:
    assert refused("serve", *NEEDED, "--polcy", "least_load") == [
        "'--polcy': no such option, did you mean --policy?"
    ]
    assert refused("serve", *NEEDED, "--xyzzy=1") == ["'--xyzzy': no such option"]


def test_an_unknown_policy() -> None:
    assert refused("serve", *NEEDED, "--policy", "least_laod") == [
        (
            "--policy / --load-balancing-policy: 'least_laod' is no policy, did you mean least_load?; "
            "accepted: round_robin, least_load, instance_aware_least_load"
        )
    ]


def test_an_unknown_unit() -> None:
    assert refused("serve", *NEEDED, "--total-timeout", "5d", "--replay-limit", "5TB") == [
        (
            "--total-timeout: '5d' has the unknown unit 'd'; "
            "accepted: a number, more than 0, with a unit of ms, s, m, h (none: seconds)"
        ),
        (
            "--replay-limit: '5TB' has the unknown unit 'TB'; "
            "accepted: a whole number with a unit of B, KB, MB, GB, KiB, MiB, GiB (none: bytes)"
        ),
    ]


def test_a_url_that_is_none() -> None:
    assert refused("serve", "--controller-url", "nonsense", "--port", "0") == [
        (
            "--controller-url / --controller-addr: 'nonsense' is no URL; "
            "accepted: http://HOST:PORT or https://HOST:PORT, with a path or without"
        )
    ]


def test_a_password_in_a_url_is_not_repeated() -> None:
    url = "http://user:hunter2@127.0.0.1:20001"
    (line,) = refused("serve", "--controller-url", url, "--port", "0")
    assert "holds a user name or password" in line
    assert "hunter2" not in line


def test_a_negative_number_is_a_fault_of_its_option() -> None:
    (line,) = refused("serve", *NEEDED, "--grace-period", "-5s")
    assert line.startswith("--grace-period: '-5s' is no duration")


def test_an_empty_value_is_a_fault_although_the_variable_is_sound() -> None:
    env = {"SKYSERVE_LB_POLICY": "round_robin"}
    (line,) = refused("serve", *NEEDED, "--policy", "", env=env)
    assert line.startswith("--policy / --load-balancing-policy: '' is no policy")


def test_all_faults_are_named_together() -> None:
    lines = refused(
        *("serve", "--prot", "80", "stray", "--policy", "x", "--tls-keyfile", "key.pem"),
        env={"SKYSERVE_LB_LOG_LEVEL": "loud", "SKYSERVE_LB_GRACE_PERIODS": "1s"},
    )
    assert [line.partition(" ")[0] for line in lines] == [
        "'--prot':",
        "'stray':",
        "--controller-url",
        "--port",
        "--policy",
        "SKYSERVE_LB_LOG_LEVEL:",
        "--tls-keyfile:",
        "SKYSERVE_LB_GRACE_PERIODS:",
    ]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((), ["Missing command.", "Try 'skyserve-lb --help'."]),
        (("srve",), ["'srve': no such command, did you mean serve?", "'skyserve-lb --help'"]),
        (("xyzzy",), ["'xyzzy': no such command, there are serve, example, up,"]),
        (("--verison",), ["--verison", "Did you mean", "--version", "'skyserve-lb --help'"]),
        (("serve", "--policy"), ["'--policy' requires an argument."]),
        (("serve", "--upstream-insecure=1"), ["'--upstream-insecure' does not take a value."]),
        (("doctor", "--jsn"), ["--jsn", "Did you mean", "--json", "'skyserve-lb doctor --help'"]),
        (("demo", "stray"), ["stray", "'skyserve-lb demo --help'"]),
    ],
)
def test_a_usage_error_is_one_line(args: tuple[str, ...], parts: list[str]) -> None:
    (line,) = refused(*args)
    assert [part for part in parts if part not in line] == []


def test_a_fault_starts_nothing() -> None:
    result = run("serve", "--policy", "x", script=SHOW_IMPORTS)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "imported:"


# --- good input -------------------------------------------------------------------------------


def test_serve_passes_the_settings_on_and_exits_with_the_code_of_the_app() -> None:
    result = run("serve", *NEEDED, "--total-timeout", "1m", script=SHOW_AND_EXIT_7)
    assert (result.returncode, result.stderr) == (7, "")
    assert "controller_url='http://127.0.0.1:20001'" in result.stdout
    assert "total_timeout=60.0" in result.stdout
    assert "upstream_insecure=False" in result.stdout


def test_the_environment_serves_and_a_flag_beats_it() -> None:
    env = {
        "SKYSERVE_LB_CONTROLLER_URL": "http://127.0.0.1:20001",
        "SKYSERVE_LB_PORT": "0",
        "SKYSERVE_LB_SERVICE_NAME": "from-the-environment",
        "SKYSERVE_LB_POLICY": "no such policy",
        "SKYSERVE_LB_UPSTREAM_INSECURE": "0",
    }
    flags = ("--policy", "round_robin", "--upstream-insecure")
    result = run("serve", *flags, script=SHOW_AND_EXIT_7, env=env)
    assert (result.returncode, result.stderr) == (7, "")
    assert "service_name='from-the-environment'" in result.stdout
    assert "policy='round_robin'" in result.stdout
    assert "upstream_insecure=True" in result.stdout


def test_the_flags_of_the_stock_load_balancer() -> None:
    result = run(
        *("serve", "--controller-addr", "http://127.0.0.1:20001"),
        *("--load-balancer-port", "0", "--load-balancing-policy", "round_robin"),
        script=SHOW_AND_EXIT_7,
    )
    assert (result.returncode, result.stderr) == (7, "")
    assert "controller_url='http://127.0.0.1:20001'" in result.stdout
    assert "policy='round_robin'" in result.stdout


def test_help_lists_every_option_with_its_meaning_and_default() -> None:
    result = run("serve", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    shown = "".join(result.stdout.split())  # lines break at spaces, and at hyphens too
    for option in OPTIONS:
        default = option.default or option.unset or "required"
        record = f"{', '.join(option.flags)} {option.kind.metavar} {option.meaning} [{default}]"
        assert "".join(record.split()) in shown
    assert [line.strip(":") for line in result.stdout.splitlines() if line.endswith(":")] == [
        *dict.fromkeys(option.group for option in OPTIONS),
        "Other",
    ]


@pytest.mark.parametrize("args", [("--help",), ("serve", "--help"), ("--version",)])
def test_help_imports_nothing_slow(args: tuple[str, ...]) -> None:
    result = run(*args, script=SHOW_IMPORTS)
    assert (result.returncode, result.stderr) == (0, "imported:\n")


def test_the_commands_are_listed() -> None:
    result = run("--help")
    assert result.returncode == 0
    names = ("serve", "example", "up", "update", "status", "logs", "down", "demo", "doctor")
    assert [name for name in names if f"\n  {name} " not in result.stdout] == []


def test_the_version_is_that_of_the_installed_package() -> None:
    result = run("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"skyserve-lb {metadata.version('skyserve-lb')}\n"


# --- ends -------------------------------------------------------------------------------------


def test_ctrl_c_is_quiet() -> None:
    result = run("serve", *NEEDED, script=INTERRUPT)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (130, "", "")


def test_a_reader_that_leaves_is_no_matter() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run("serve", "--help", stdout=writer)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")
