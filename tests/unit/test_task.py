"""Task files: what is read from them, and the one line that names what is wrong, by line and key."""

import pytest

from controller_client.embedded.task import Task, TaskError, parse

WHOLE = """\
name: my-service
workdir: code
envs: {TEXT: Hello, NUMBER: 3, TOKEN: }
secrets:
  KEY: k
setup: pip list
run: serve --port {port}
resources:
  ports: 8081
  cpus: 2+
  accelerators: A100:1
file_mounts:
  /data: s3://bucket
service:
  readiness_probe:
    path: /health
    post_data: '{"a": 1}'
    headers: {X-Key: b}
    initial_delay_seconds: 20
    timeout_seconds: 1.5
  replica_policy:
    min_replicas: 1
    max_replicas: 3
    target_qps_per_replica: {H100: 9, "A100:1": 2.5}
    spot_placer: dynamic_fallback
  ports: 8081
  load_balancing_policy: instance_aware_least_load
  tls:
    keyfile: key.pem
    certfile: cert.pem
"""
LEAST = "service: {}\nrun: serve {port}\n"


def read(text: str, *, there: bool = True, **environ: str) -> tuple[Task, list[str]]:
    def find(path: str) -> str | None:
        return f"/full/{path}" if there else None

    return parse(text, "s.yaml", environ, find)


def fault(text: str, *, there: bool = True) -> str:
    with pytest.raises(TaskError) as caught:
        read(text, there=there)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_that_a_file_may_hold() -> None:
    task, notes = read(WHOLE, TOKEN="t")
    assert task.envs == {"TEXT": "Hello", "NUMBER": "3", "TOKEN": "t", "KEY": "k"}
    assert task.probe == {
        "path": "/health",
        "post_data": {"a": 1},
        "headers": {"X-Key": "b"},
        "initial_delay_seconds": 20,
        "timeout_seconds": 1.5,
    }
    assert task.policy["min_replicas"] == 1
    assert task.policy["max_replicas"] == 3
    assert task.policy["target_qps_per_replica"] == 2.5
    assert task.accelerator == "A100"
    assert task.config["workdir"] == "/full/code"
    assert task.config["service"]["tls"] == {
        "keyfile": "/full/key.pem",
        "certfile": "/full/cert.pem",
    }
    assert notes == [
        "s.yaml: resources.cpus: has no effect on one machine",
        "s.yaml: file_mounts: has no effect on one machine",
        "s.yaml: service.replica_policy.spot_placer: has no effect on one machine",
    ]


def test_the_defaults_are_skypilots() -> None:
    task, notes = read(LEAST)
    assert notes == []
    assert task.probe == {"path": "/", "initial_delay_seconds": 1200, "timeout_seconds": 15}
    assert task.policy == {
        "min_replicas": 1,
        "max_replicas": 1,
        "target_qps_per_replica": None,
        "upscale_delay_seconds": 300,
        "downscale_delay_seconds": 1200,
    }
    assert (task.envs, task.accelerator) == ({}, "unknown")


def test_short_forms() -> None:
    task, _ = read("service: {readiness_probe: /health, replicas: 2}\nrun: x {port}\n")
    assert task.probe["path"] == "/health"
    assert task.policy["min_replicas"] == task.policy["max_replicas"] == 2


@pytest.mark.parametrize(
    ("accelerators", "name"),
    [("A100", "A100"), ("A100:8", "A100"), ("{A100: 1}", "A100"), ("[L4, T4]", "L4")],
)
def test_the_name_of_the_accelerator(accelerators: str, name: str) -> None:
    task, _ = read(f"{LEAST}resources: {{accelerators: {accelerators}}}\n")
    assert task.accelerator == name


def test_mounts_and_the_working_directory_forbid_reuse_alike() -> None:
    assert read(LEAST)[0].config["file_mounts"] == {}
    assert read(f"{LEAST}file_mounts:\n")[0].config["file_mounts"] == {}
    assert read(f"{LEAST}workdir: .\n")[0].config["file_mounts"] == {"workdir": "/full/."}
    assert read(f"{LEAST}file_mounts: {{/a: b}}\n")[0].config["file_mounts"] == {"/a": "b"}


def test_a_run_that_cannot_know_its_port_is_noted() -> None:
    _, notes = read("service: {}\nrun: serve --port 8081\n")
    assert notes == [
        "s.yaml: run: names neither {port} nor $SKYPILOT_SERVE_PORT, where it has to listen"
    ]
    assert read("service: {}\nrun: serve $SKYPILOT_SERVE_PORT\n")[1] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s.yaml:1: the file holds no map of keys"),
        ("run: x", "s.yaml:1: service is missing"),
        ("service: {}", "s.yaml:1: run is missing"),
        ("run: x\nservice: 3", "s.yaml:2: service: is not a map"),
        (
            "run: x\nservice:\n  replcas: 3",
            "s.yaml:3: service.replcas: no such key, did you mean replicas?",
        ),
        (
            "run: x\nservice:\n  tls:\n    x: 3",
            "s.yaml:4: service.tls.x: no such key, there are keyfile, certfile",
        ),
        ("run: x\nservice: {}\nrun: y", "s.yaml:3: run: is there twice"),
        (
            "run: x\nservice:\n  replicas: three",
            "s.yaml:3: service.replicas: 'three' is not a whole number from 0 to 1000",
        ),
        (
            "run: x\nservice:\n  replicas: -1",
            "s.yaml:3: service.replicas: '-1' is not a whole number from 0 to 1000",
        ),
        ("run: [x]\nservice: {}", "s.yaml:1: run: is not a text"),
        ("envs:\n  A: [1]", "s.yaml:1: envs: is not a map of names and their texts or numbers"),
        ("envs: {A=B: x}", "s.yaml:1: envs: is not a map of names and their texts or numbers"),
        ('envs: {A: "x\\0"}', "s.yaml:1: envs: is not a map of names and their texts or numbers"),
        ("envs:\n  A: 1\n  A: 2", "s.yaml:3: envs.A: is there twice"),
        ("? [a, b]\n: x", "s.yaml:1: holds a key that is no text"),
        ('"\\e[31m\\n": 1', r"s.yaml:1: \x1b[31m\n: no such key, there are name"),
        (
            'service: {readiness_probe: {path: /, headers: {A: "b\\r\\nC: d"}}}',
            "s.yaml:1: service.readiness_probe.headers: is not a map of headers and their texts",
        ),
        (
            "service: {readiness_probe: {path: /, timeout_seconds: .inf}}",
            "s.yaml:1: service.readiness_probe.timeout_seconds: '.inf' is not a number of seconds",
        ),
        (f"name: {'a' * 64}", f"s.yaml:1: name: '{'a' * 60}' is not a name of letters"),
        (f"{LEAST}config: &a {{b: *a}}", "s.yaml: cannot be read as YAML: Circular reference"),
        (f'{LEAST}setup: "\\ud800"', "s.yaml: cannot be read as YAML: 'utf-8' codec can't encode"),
        (
            "envs:\n  A:\nrun: x\nservice: {}",
            "s.yaml:2: envs.A: has no value, here or in the environment",
        ),
        (
            "run: x\nservice:\n  readiness_probe: health",
            "s.yaml:3: service.readiness_probe: its path does not begin with /",
        ),
        (
            "run: x\nservice:\n  readiness_probe:\n    timeout_seconds: 3",
            "s.yaml:3: service.readiness_probe: path is missing",
        ),
        (
            "run: x\nservice:\n  readiness_probe:\n    path: /\n    post_data: '{'",
            "s.yaml:5: service.readiness_probe.post_data: is not JSON",
        ),
        (
            "run: x\nservice:\n  replicas: 2\n  replica_policy: {min_replicas: 1}",
            "s.yaml:3: service.replicas: is there beside replica_policy: use one of them",
        ),
        (
            "run: x\nservice:\n  replica_policy:\n    min_replicas: 2\n    max_replicas: 1",
            "s.yaml:5: service.replica_policy.max_replicas: is less than min_replicas",
        ),
        (
            "run: x\nservice:\n  replica_policy:\n    max_replicas: 1",
            "s.yaml:3: service.replica_policy: min_replicas is missing",
        ),
        (
            "run: x\nservice:\n  load_balancing_policy: instance_aware_least_load",
            (
                "s.yaml:3: service.load_balancing_policy: instance_aware_least_load and a map of "
                "target_qps_per_replica go together"
            ),
        ),
        ("run: x\nservice:\n  tls: {keyfile: k}", "s.yaml:3: service.tls: certfile is missing"),
        (
            "num_nodes: 2",
            "s.yaml:1: num_nodes: '2' is not 1: a replica here is one process on one machine",
        ),
        (
            "service:\n  pool: true",
            "s.yaml:2: service.pool: 'true' is not possible here: a pool has no endpoint",
        ),
        (
            "a: [",
            "s.yaml:1: cannot be read as YAML: expected the node content, but found '<stream end>'",
        ),
        ("config: 2024-99-99", "s.yaml: cannot be read as YAML: month must be in 1..12"),
        ("a: " + "[" * 1500, "s.yaml: cannot be read as YAML: maximum recursion depth exceeded"),
        ("run: x\n---\nrun: y", "s.yaml:2: cannot be read as YAML: but found another document"),
        (
            "run: \x00",
            "s.yaml: cannot be read as YAML: unacceptable character #x0000: special characters are not allowed",
        ),
    ],
)
def test_a_fault_is_one_line_that_names_line_and_key(text: str, message: str) -> None:
    assert fault(text).startswith(message)


def test_a_folder_that_is_not_there_is_a_fault() -> None:
    assert fault(f"{LEAST}workdir: code\n", there=False) == "s.yaml:3: workdir: there is no code"
    text = "run: x\nservice:\n  tls:\n    keyfile: k.pem\n    certfile: c.pem"
    assert fault(text, there=False) == "s.yaml:4: service.tls.keyfile: there is no k.pem"
