"""The add-on's parts that need no SkyPilot: hook, patches, drop-in settings, doctor's judgement."""

import json
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller_client.skypilot import doctor, drop_in
from controller_client.skypilot.bounded_log import BoundedLog
from controller_client.skypilot.hook import wanted_parts
from lb.settings import load

ROOT = Path(__file__).resolve().parents[2]
PTH = ROOT / "controller_client/skypilot/skyserve_lb.pth"
BOTH = {"fix", "lb"}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (None, BOTH),
        ("", BOTH),
        ("on", BOTH),
        ("fix", {"fix"}),
        (" LB ", {"lb"}),
        ("off", set()),
        ("OFF", set()),
        ("fxi", set()),
    ],
)
def test_the_variable_names_the_parts(value: str | None, parts: set[str]) -> None:
    assert wanted_parts(value) == parts


# A SkyPilot of the least that the hook looks at. Its modules say whether they were patched.
SKY = {
    "sky/__init__.py": "__version__ = '{version}'\n",
    "sky/serve/__init__.py": "",
    "sky/serve/load_balancer.py": "def run_load_balancer({parameters}): pass\n",
    "sky/serve/replica_managers.py": "",
    "sky/serve/controller.py": """
import logging, sys
from sky.serve import load_balancer, replica_managers
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
logger = logging.getLogger("sky")
class SkyServeController:
    def run(self): pass
def run_controller(*args, **kwargs):
    print("ran", args, kwargs)
""",
}
STOCK = "controller_addr, load_balancer_port, load_balancing_policy_name=None, tls_credential=None"
KNOWN = f"{STOCK}, target_qps_per_replica=None"
SHOW = (
    "import sys; from sky.serve import load_balancer as m;"
    "p = sys.modules.get('controller_client.skypilot.patches');"
    "print(m.run_load_balancer.__module__, p.outcome if p else None)"
)


def started(
    folder: Path,
    *,
    version: str = "0.12.0",
    parameters: str = KNOWN,
    hook: str = "",
    code: str = SHOW,
) -> str:
    """What a new interpreter prints that reads the .pth file first, as site-packages' would be."""
    for name, text in SKY.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(version=version, parameters=parameters))
    done = subprocess.run(
        (sys.executable, "-c", f"{PTH.read_text()}\n{code}"),
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "SKYSERVE_LB_HOOK": hook},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_hook_puts_the_drop_in_into_a_known_skypilot(tmp_path: Path) -> None:
    assert started(tmp_path) == "controller_client.skypilot.drop_in {'lb': 'active'}"


def test_parameters_with_defaults_may_follow_the_known_ones(tmp_path: Path) -> None:
    shown = started(tmp_path, version="0.14.1", parameters=f"{KNOWN}, stream_timeout_seconds=120")
    assert shown == "controller_client.skypilot.drop_in {'lb': 'active'}"


@pytest.mark.parametrize(
    ("version", "parameters", "why"),
    [
        ("0.11.9", KNOWN, "SkyPilot 0.11.9 is not in 0.12 <= version < 0.15"),
        ("0.15.0", KNOWN, "SkyPilot 0.15.0 is not in 0.12 <= version < 0.15"),
        ("1.0.0.dev1", KNOWN, "SkyPilot 1.0.0.dev1 is not in 0.12 <= version < 0.15"),
        ("unknown", KNOWN, "SkyPilot unknown is not a release"),
        ("0.12.0", KNOWN.replace("=None", "") + ", more", "run_load_balancer takes ("),
        ("0.12.0", STOCK, "run_load_balancer takes ("),
        ("0.12.0", f"config, {STOCK}", "run_load_balancer takes (config, "),
    ],
)
def test_an_unknown_skypilot_is_left_alone(
    tmp_path: Path, version: str, parameters: str, why: str
) -> None:
    shown = started(tmp_path, version=version, parameters=parameters)
    assert shown.startswith("sky.serve.load_balancer {'lb': ")
    assert f"left alone: {why}" in shown


def test_a_part_that_is_not_asked_for_is_left_alone(tmp_path: Path) -> None:
    shown = started(tmp_path, hook="fix")
    assert shown.startswith("sky.serve.load_balancer {'lb': ")
    assert "off: SKYSERVE_LB_HOOK asks for fix alone" in shown


def test_the_controllers_log_says_once_what_was_left_alone(tmp_path: Path) -> None:
    code = "from sky.serve import controller as c; c.run_controller('llm', port=1)"
    why = "left alone: SkyPilot 0.15.0 is not in 0.12 <= version < 0.15"
    assert started(tmp_path, version="0.15.0", code=code).splitlines() == [
        f"WARNING skyserve-lb {metadata.version('skyserve-lb')}: fix {why}; lb {why}",
        "ran ('llm',) {'port': 1}",
    ]


def test_a_skypilot_that_is_not_as_expected_is_not_patched_in_part(tmp_path: Path) -> None:
    code = "from sky.serve import controller as c; c.run_controller()"
    said, ran = started(tmp_path, code=code).splitlines()
    assert "fix failed: " in said  # the replica manager of this SkyPilot is empty
    assert said.endswith("; lb active")
    assert ran == "ran () {}"


def test_off_means_that_nothing_of_ours_is_loaded(tmp_path: Path) -> None:
    assert started(tmp_path, hook="off") == "sky.serve.load_balancer None"


def test_without_our_package_the_pth_line_does_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-S", "-c", PTH.read_text()), cwd=tmp_path, capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")


def settings(*arguments: Any) -> Any:
    return load(drop_in.settings_of(*arguments), {})


def test_skypilots_arguments_become_settings() -> None:
    tls = SimpleNamespace(keyfile="~/key.pem", certfile="/cert.pem")
    made = settings("http://0.0.0.0:20001", 30001, "round_robin", tls, 2.5)
    assert made.controller_url == "http://127.0.0.1:20001"
    assert (made.port, made.admin_port) == (30001, 31001)
    assert (made.policy, made.target_qps) == ("round_robin", 2.5)
    assert (made.tls_keyfile, made.tls_certfile) == (str(Path.home() / "key.pem"), "/cert.pem")


def test_what_skypilot_leaves_out_keeps_our_default() -> None:
    made = settings("http://127.0.0.1:20001", 30001, None, None, None)
    assert (made.policy, made.target_qps, made.tls_keyfile) == ("least_load", None, None)


def test_targets_by_accelerator_reach_the_policy() -> None:
    targets = {"A100": 2.5, "H100": 5}
    made = settings("http://127.0.0.1:1", 30001, "instance_aware_least_load", None, targets)
    assert (made.policy, made.target_qps) == ("instance_aware_least_load", targets)


@pytest.mark.parametrize(
    ("policy", "targets"), [("instance_aware_least_load", 2.5), ("of_a_fork", None)]
)
def test_a_policy_that_cannot_be_had_does_not_stop_the_balancer(policy: str, targets: Any) -> None:
    assert settings("http://127.0.0.1:1", 30001, policy, None, targets).policy == "least_load"


def test_a_bad_variable_is_named_and_does_not_stop_the_balancer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYSERVE_LB_TOTAL_TIMEOUT", "soon")
    values = {"controller_url": "http://127.0.0.1:1", "port": "30001"}
    made = drop_in._load(values, {"log_format": "console"})
    assert (made.total_timeout, made.log_format) == (285.0, "console")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("skyserve-lb: SKYSERVE_LB_TOTAL_TIMEOUT: ")
    assert said[1] == "skyserve-lb: going on without the SKYSERVE_LB_ variables"


def test_a_variable_beats_what_the_drop_in_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYSERVE_LB_LOG_FORMAT", "json")
    values = {"controller_url": "http://127.0.0.1:1", "port": "30001"}
    assert drop_in._load(values, {"log_format": "console"}).log_format == "json"


def test_the_service_is_named_by_its_own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["service.py", "--service-name", "llm", "--job-id", "1"])
    assert drop_in.own_defaults(30001)["service_name"] == "llm"
    monkeypatch.setattr(sys, "argv", ["service.py", "--service-name"])
    assert "service_name" not in drop_in.own_defaults(30001)


def test_an_admin_port_in_use_does_not_stop_the_balancer() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert drop_in.own_defaults(taken - drop_in.ADMIN_PORT_OFFSET)["admin_port"] == "0"
    assert "admin_port" not in drop_in.own_defaults(taken - drop_in.ADMIN_PORT_OFFSET)


@pytest.mark.parametrize(
    ("seconds", "idle", "total"), [(120, 0.0, 285.0), (60, 60.0, 285.0), (900, 900.0, 900.0)]
)
def test_a_stream_timeout_of_the_users_bounds_silence(
    seconds: float, idle: float, total: float
) -> None:
    made = settings("http://127.0.0.1:1", 30001, None, None, None)
    changed = drop_in._with_stream_timeout(made, seconds)
    assert (changed.stream_idle_timeout, changed.total_timeout) == (idle, total)


def test_a_log_is_cut_at_its_limit_and_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "load_balancer.log"
    with path.open("w", encoding="utf-8") as file:
        log = BoundedLog(file, limit=1000, kept=100)
        for number in range(200):
            log.write(f"line {number:03}\n")
            log.flush()
            assert path.stat().st_size < 1300
    lines = path.read_text().splitlines()
    assert lines[0] == f"skyserve-lb: earlier lines are in {path}.1"
    assert lines[-1] == "line 199"
    # Each line is whole, and none is missing between the two files.
    both = Path(f"{path}.1").read_text().splitlines()[1:] + lines[1:]
    numbers = sorted({int(line.split()[1]) for line in both})
    assert numbers == list(range(numbers[0], 200))


def test_only_a_file_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert isinstance(BoundedLog.around(file), BoundedLog)
    with Path("/dev/null").open("w") as device:
        assert BoundedLog.around(device) is device


def test_a_log_that_cannot_be_rotated_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    Path(f"{path}.1").mkdir()
    with path.open("w") as file:
        log = BoundedLog(file, limit=10, kept=5)
        log.write("twelve bytes\n")
        log.write("more\n")
        log.flush()
    lines = path.read_text().splitlines()
    assert (lines[0], lines[2]) == ("twelve bytes", "more")
    assert lines[1].startswith("skyserve-lb: this log cannot be rotated: ")


def findings(**changed: Any) -> dict[str, Any]:
    service = {
        "name": "llm",
        "status": "READY",
        "pool": False,
        "controller": {"version": "1", "parts": {"fix": "active", "lb": "active"}, "faults": {}},
        "balancer": "skyserve-lb",
        "active_versions": [2],
        "ready": 2,
        "routable": 2,
        "agree": True,
    }
    found = {
        "python": "/python",
        "skypilot": "0.12.0",
        "wheel": "0.1.0",
        "hook": True,
        "variable": "",
        "parts": {"fix": "active", "lb": "active"},
    }
    own = {key: value for key, value in changed.items() if key in found}
    return {**found, **own, "services": [{**service, **changed}]}


def test_the_doctor_finds_nothing_where_nothing_is() -> None:
    assert doctor.judge(findings()) == []
    assert doctor.describe(findings(), [])[-1] == "All is well."


NO_LB = {"fix": "active", "lb": "off: SKYSERVE_LB_HOOK asks for fix alone"}


@pytest.mark.parametrize(
    "changed",
    [
        {"pool": True, "balancer": None},
        {"variable": "fix", "parts": NO_LB, "balancer": "python"},
    ],
)
def test_the_doctor_accepts_what_was_chosen(changed: dict[str, Any]) -> None:
    assert doctor.judge(findings(**changed)) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"skypilot": None}, "no SkyPilot in /python; name its Python with --python"),
        ({"wheel": None}, "skyserve-lb is not installed: /python -m pip install skyserve-lb"),
        ({"hook": False}, "the hook is not active although the wheel is installed"),
        ({"variable": "off"}, "the hook is switched off by SKYSERVE_LB_HOOK=off"),
        (
            {"parts": {"fix": "left alone: SkyPilot 0.15.0"}},
            "part fix: left alone: SkyPilot 0.15.0",
        ),
        ({"balancer": "python"}, "service llm: load balancer: not ours (process python)"),
        ({"balancer": None}, "service llm: load balancer: none is listening"),
        ({"controller": {"fault": "it runs without the hook"}}, "service llm: controller: it runs"),
        (
            {"controller": {"parts": {"fix": "failed: KeyError('x')"}, "faults": {}}},
            "service llm: controller: fix failed: KeyError('x')",
        ),
        (
            {"controller": {"parts": {"fix": "active"}, "faults": {"merge": 2}}},
            "service llm: controller: faults inside the fix (merge 2)",
        ),
        (
            {"routable": 0, "agree": False},
            "service llm: 2 READY replicas, none of an active version (active: [2])",
        ),
    ],
)
def test_the_doctor_names_what_is_wrong(changed: dict[str, Any], problem: str) -> None:
    found = findings(**changed)
    problems = doctor.judge(found)
    assert [said for said in problems if said.startswith(problem)]
    assert doctor.describe(found, problems)[-len(problems) :] == [f"! {said}" for said in problems]


def test_the_doctor_says_in_one_line_that_a_python_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.doctor("/no/such/python", as_json=False) == 2
    said = capsys.readouterr()
    assert said.err == "skyserve-lb doctor: --python /no/such/python: No such file or directory\n"


def test_the_doctor_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.doctor(sys.executable, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0) == (not found["problems"])
    assert Path(found["python"]).samefile(sys.executable)
