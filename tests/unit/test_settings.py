"""The settings: defaults, sources, faults, and the table that the README shows."""

from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.policies import POLICIES
from lb.settings import OPTIONS, Settings, SettingsError, load, option_table
from lb.stickiness import Sticky

README = Path(__file__).parents[2] / "README.md"
NEEDED = {"controller_url": "http://127.0.0.1:20001", "port": "30001"}
BY_NAME = {option.name: option for option in OPTIONS}


def loaded(**values: str) -> Settings:
    return load(NEEDED | values, {})


def faults(
    values: dict[str, str] | None = None, environ: dict[str, str] | None = None
) -> list[str]:
    """What `load` says of these beside the options that it needs."""
    with pytest.raises(SettingsError) as caught:
        load(NEEDED | (values or {}), environ or {})
    return list(caught.value.faults)


# --- defaults ---------------------------------------------------------------------------------


def test_the_defaults() -> None:
    assert asdict(loaded()) == {
        "controller_url": "http://127.0.0.1:20001",
        "service_name": "default",
        "host": "0.0.0.0",
        "port": 30001,
        "admin_host": "127.0.0.1",
        "admin_port": 31001,
        "admin_token_file": None,
        "tls_keyfile": None,
        "tls_certfile": None,
        "workers": 1,
        "sync_interval": 20.0,
        "grace_period": 30.0,
        "policy": "least_load",
        "target_qps": None,
        "sticky": None,
        "total_timeout": 285.0,
        "connect_timeout": 5.0,
        "no_replica_wait": 10.0,
        "retry": "before-response",
        "replay_limit": 16 * 2**20,
        "replay_budget": 512 * 2**20,
        "stream_idle_timeout": 0.0,
        "header_timeout": 30.0,
        "keepalive_timeout": 75.0,
        "max_connections": 10_000,
        "drain_timeout": 600.0,
        "upstream_keepalive": 4.0,
        "upstream_ca": None,
        "upstream_insecure": False,
        "log_format": "auto",
        "log_level": "info",
        "access_log": "errors",
    }


def test_the_grace_period_follows_the_sync_interval_unless_it_is_given() -> None:
    assert loaded(sync_interval="2s").grace_period == 3.0
    assert loaded(sync_interval="2s", grace_period="0").grace_period == 0


@pytest.mark.parametrize(
    ("port", "admin_port"), [("0", 0), ("1", 1001), ("30001", 31001), ("64535", 65535)]
)
def test_the_admin_port_follows_the_port(port: str, admin_port: int) -> None:
    assert loaded(port=port).admin_port == admin_port


def test_an_admin_port_that_would_be_out_of_range_must_be_given() -> None:
    assert faults({"port": "64536"}) == [
        (
            "--admin-port (or SKYSERVE_LB_ADMIN_PORT) is missing, and its default, 65536, is out of "
            "range; accepted: a port from 0 (a free one) to 65535"
        )
    ]
    assert loaded(port="64536", admin_port="9000").admin_port == 9000


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        loaded().port = 1  # type: ignore[misc]


# --- sources ----------------------------------------------------------------------------------


def test_the_environment_serves_every_option() -> None:
    given = {
        "controller_url": "https://c:1",
        "service_name": "llama",
        "host": "127.0.0.1",
        "port": "1",
        "admin_host": "::1",
        "admin_port": "2",
        "admin_token_file": "t",
        "tls_keyfile": "k.pem",
        "tls_certfile": "c.pem",
        "workers": "3",
        "sync_interval": "1",
        "grace_period": "2",
        "policy": "instance_aware_least_load",
        "target_qps": '{"A100": 3}',
        "sticky": "cookie:sid",
        "total_timeout": "6",
        "connect_timeout": "4",
        "no_replica_wait": "5",
        "retry": "safe",
        "replay_limit": "7",
        "replay_budget": "8",
        "stream_idle_timeout": "9",
        "header_timeout": "10",
        "keepalive_timeout": "11",
        "max_connections": "12",
        "drain_timeout": "13",
        "upstream_keepalive": "14",
        "upstream_ca": "ca.pem",
        "upstream_insecure": "0",
        "log_format": "json",
        "log_level": "debug",
        "access_log": "all",
    }
    assert given.keys() == BY_NAME.keys()
    by_variable = load({}, {f"SKYSERVE_LB_{name.upper()}": text for name, text in given.items()})
    assert by_variable == load(given, {})
    assert by_variable == Settings(
        controller_url="https://c:1",
        service_name="llama",
        host="127.0.0.1",
        port=1,
        admin_host="::1",
        admin_port=2,
        admin_token_file="t",
        tls_keyfile="k.pem",
        tls_certfile="c.pem",
        workers=3,
        sync_interval=1.0,
        grace_period=2.0,
        policy="instance_aware_least_load",
        target_qps={"A100": 3.0},
        sticky=Sticky("cookie", "sid"),
        total_timeout=6.0,
        connect_timeout=4.0,
        no_replica_wait=5.0,
        retry="safe",
        replay_limit=7,
        replay_budget=8,
        stream_idle_timeout=9.0,
        header_timeout=10.0,
        keepalive_timeout=11.0,
        max_connections=12,
        drain_timeout=13.0,
        upstream_keepalive=14.0,
        upstream_ca="ca.pem",
        upstream_insecure=False,
        log_format="json",
        log_level="debug",
        access_log="all",
    )


def test_a_flag_beats_its_variable_even_a_faulty_one() -> None:
    environ = {"SKYSERVE_LB_PORT": "none", "SKYSERVE_LB_HOST": "127.0.0.1"}
    result = load(NEEDED | {"host": "127.0.0.2"}, environ)
    assert (result.port, result.host) == (30001, "127.0.0.2")


def test_an_empty_variable_counts_as_unset_and_an_empty_flag_does_not() -> None:
    assert load(NEEDED, {"SKYSERVE_LB_POLICY": ""}).policy == "least_load"
    assert faults({"policy": ""})[0].startswith("--policy / --load-balancing-policy: '' is no")


def test_space_around_a_value_is_dropped() -> None:
    assert load(NEEDED, {"SKYSERVE_LB_SERVICE_NAME": "llama\n"}).service_name == "llama"


def test_variables_without_the_prefix_are_not_read() -> None:
    assert load(NEEDED, {"POLICY": "x", "PORT": "1", "LB_PORT": "2"}) == loaded()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SKYSERVE_LB_PORT", "tcp://10.0.0.1:80"),
        ("SKYSERVE_LB_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("SKYSERVE_LB_PORT_80_TCP_PROTO", "tcp"),
        ("SKYSERVE_LB_PORT_80_TCP_PORT", "80"),
        ("SKYSERVE_LB_PORT_53_UDP_ADDR", "10.0.0.1"),
        ("SKYSERVE_LB_SERVICE_HOST", "10.0.0.1"),
        ("SKYSERVE_LB_SERVICE_PORT", "80"),
        ("SKYSERVE_LB_SERVICE_PORT_HTTP", "80"),
        ("SKYSERVE_LB_ADMIN_PORT", "tcp://10.0.0.1:9000"),
        ("SKYSERVE_LB_ADMIN_SERVICE_PORT", "9000"),
        ("SKYSERVE_LB_HOOK", "off"),
        ("SKYSERVE_LB_REQUIREMENT", "skyserve-lb"),
    ],
)
def test_variables_of_kubernetes_and_of_the_add_on_are_left_alone(variable: str, text: str) -> None:
    assert load(NEEDED, {variable: text}) == loaded()


def test_no_option_is_taken_for_a_variable_of_kubernetes_or_of_the_add_on() -> None:
    said = faults({}, {option.variable: "\x00" for option in OPTIONS})
    named = {fault.partition(":")[0] for fault in said}
    assert named == {option.variable for option in OPTIONS if option.name not in NEEDED}


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("SKYSERVE_LB_POLCY", ", did you mean SKYSERVE_LB_POLICY?"),
        ("SKYSERVE_LB_GRACEPERIOD", ", did you mean SKYSERVE_LB_GRACE_PERIOD?"),
        ("SKYSERVE_LB_QQ", "; see --help for those there are"),
        ("SKYSERVE_LB_", "; see --help for those there are"),
        ("SKYSERVE_LB_HOOKS", ", did you mean SKYSERVE_LB_HOOK?"),
    ],
)
def test_a_misspelt_variable_does_not_pass_in_silence(variable: str, hint: str) -> None:
    said = faults({}, {variable: "1"})
    assert said[0].startswith(f"{variable}: no such setting")
    assert said == [f"{variable}: no such setting{hint}"]


def test_a_name_that_is_no_field_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="no such settings: polcy, prot"):
        load(NEEDED | {"prot": "1", "polcy": "x"}, {})


# --- faults -----------------------------------------------------------------------------------


def test_what_is_needed_is_named_with_flags_and_variable() -> None:
    with pytest.raises(SettingsError) as caught:
        load({}, {})
    assert caught.value.faults == (
        (
            "--controller-url / --controller-addr (or SKYSERVE_LB_CONTROLLER_URL) is missing; "
            "accepted: http://HOST:PORT or https://HOST:PORT, with a path or without"
        ),
        (
            "--port / --load-balancer-port (or SKYSERVE_LB_PORT) is missing; "
            "accepted: a port from 0 (a free one) to 65535"
        ),
    )


def test_a_fault_names_the_source_what_is_wrong_and_what_is_accepted() -> None:
    assert faults({"total_timeout": "5d"}) == [
        (
            "--total-timeout: '5d' has the unknown unit 'd'; "
            "accepted: a number, more than 0, with a unit of ms, s, m, h (none: seconds)"
        )
    ]
    assert faults({}, {"SKYSERVE_LB_POLICY": "least_laod"}) == [
        (
            "SKYSERVE_LB_POLICY: 'least_laod' is no policy, did you mean least_load?; "
            "accepted: round_robin, least_load, instance_aware_least_load"
        )
    ]


def test_all_faults_are_named_together() -> None:
    values = {"controller_url": "nonsense", "connect_timeout": "9", "tls_keyfile": "key.pem"}
    environ = {
        "SKYSERVE_LB_TOTAL_TIMEOUT": "5s",
        "SKYSERVE_LB_REPLAY_LIMIT": "1TB",
        "SKYSERVE_LB_POLCY": "round_robin",
    }
    with pytest.raises(SettingsError) as caught:
        load(values, environ)
    assert [fault.partition(" ")[0] for fault in caught.value.faults] == [
        "--controller-url",
        "--port",
        "SKYSERVE_LB_REPLAY_LIMIT:",
        "--connect-timeout:",
        "--tls-keyfile:",
        "SKYSERVE_LB_POLCY:",
    ]
    assert str(caught.value) == "\n".join(caught.value.faults)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_registry_can_be_chosen(policy: str) -> None:
    assert loaded(policy=policy, target_qps='{"A100": 1}').policy == policy


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ({"connect_timeout": "6s"}, {"total_timeout": "5s"}),
        ({"no_replica_wait": "6s"}, {"total_timeout": "5s"}),
        ({"replay_limit": "2MiB"}, {"replay_budget": "1MiB"}),
    ],
)
def test_a_limit_beyond_another_is_a_fault_only_if_it_was_given(
    low: dict[str, str], high: dict[str, str]
) -> None:
    (flag,) = (BY_NAME[name].flag for name in low)
    (other,) = (BY_NAME[name].flag for name in high)
    assert faults(low | high) == [f"{flag}: it is beyond {other} and could never be reached"]
    assert loaded(**high)
    assert loaded(**low)
    assert loaded(**low, **dict.fromkeys(high, *low.values()))


def test_a_faulty_limit_is_not_compared_with_another() -> None:
    assert len(faults({"connect_timeout": "9s", "total_timeout": "5d"})) == 1
    assert len(faults({"connect_timeout": "9d", "total_timeout": "5s"})) == 1


def test_both_ports_cannot_be_the_same_but_for_free_ones() -> None:
    assert faults({"admin_port": "30001"}) == [
        "--admin-port: it is the port for clients; accepted: any other"
    ]
    assert loaded(port="0", admin_port="0").admin_port == 0


@pytest.mark.parametrize(
    ("one", "other"), [("tls_keyfile", "tls_certfile"), ("tls_certfile", "tls_keyfile")]
)
def test_a_key_needs_its_certificate_and_the_other_way_round(one: str, other: str) -> None:
    assert faults({one: "x.pem"}) == [
        f"{BY_NAME[one].flag}: it needs {BY_NAME[other].flag}; accepted: both or neither"
    ]


def test_certificates_to_trust_make_no_sense_without_verification() -> None:
    given = {"upstream_ca": "ca.pem", "upstream_insecure": "yes"}
    assert faults(given) == [
        "--upstream-insecure: it leaves --upstream-ca unused; accepted: one of them"
    ]
    assert loaded(upstream_insecure="yes").upstream_insecure
    assert loaded(upstream_ca="ca.pem").upstream_ca == "ca.pem"


def test_the_instance_aware_policy_needs_targets_by_accelerator() -> None:
    policy = {"policy": "instance_aware_least_load"}
    wanted = (
        "--target-qps: instance_aware_least_load needs it by accelerator; "
        'accepted: a JSON object such as {"A100": 2.5}'
    )
    assert faults(policy) == [wanted]
    assert faults(policy | {"target_qps": "2"}) == [wanted]
    assert faults(policy, {"SKYSERVE_LB_TARGET_QPS": "2"}) == [
        wanted.replace("--target-qps", "SKYSERVE_LB_TARGET_QPS")
    ]
    assert len(faults(policy | {"target_qps": "x"})) == 1
    assert loaded(target_qps="2").target_qps == 2.0


@given(st.dictionaries(st.sampled_from(sorted(BY_NAME)), st.text(), max_size=6))
def test_whatever_is_given_the_result_is_settings_or_one_line_a_fault(
    given: dict[str, str],
) -> None:
    said: tuple[str, ...] = ()
    try:
        load(NEEDED | given, {})
    except SettingsError as error:
        said = error.faults
        assert said
    flags = tuple(option.flag for option in OPTIONS)
    assert all(fault.isprintable() and fault.startswith(flags) for fault in said)


# --- options and their documentation ----------------------------------------------------------


def test_every_field_is_an_option_with_flag_and_variable() -> None:
    assert [option.name for option in OPTIONS] == [field.name for field in fields(Settings)]
    option = BY_NAME["stream_idle_timeout"]
    assert option.flags == ("--stream-idle-timeout",)
    assert option.variable == "SKYSERVE_LB_STREAM_IDLE_TIMEOUT"
    assert not option.required


def test_the_stock_load_balancers_flags_are_aliases() -> None:
    aliases = {option.name: option.alias for option in OPTIONS if option.alias}
    assert aliases == {
        "controller_url": "--controller-addr",
        "port": "--load-balancer-port",
        "policy": "--load-balancing-policy",
    }


def test_only_a_yes_or_no_option_has_no_value() -> None:
    assert [option.name for option in OPTIONS if not option.takes_value] == ["upstream_insecure"]


def test_options_of_a_group_stand_together() -> None:
    groups = [option.group for option in OPTIONS]
    changes = [new for old, new in zip([None, *groups], groups, strict=False) if new != old]
    assert len(changes) == len(set(groups))


def test_the_table_has_a_row_for_every_option() -> None:
    head, rule, *rows = option_table().splitlines()
    assert head == "| flag | variable | default | meaning |"
    assert rule.count("|") == 5
    assert len(rows) == len(OPTIONS)
    assert all(row.replace(r"\|", "").count("|") == 5 for row in rows)
    assert rows[0].startswith(
        "| `--controller-url URL` (stock: `--controller-addr`) | `SKYSERVE_LB_CONTROLLER_URL` | required |"
    )
    assert (
        "| `--retry before-response\\|safe` | `SKYSERVE_LB_RETRY` | `before-response` |" in rows[18]
    )
    assert any("| 1.5 x sync interval |" in row for row in rows)


def test_the_readme_shows_the_table() -> None:
    _, begin, rest = README.read_text(encoding="utf-8").partition("<!-- options -->\n")
    block, end, _ = rest.partition("<!-- /options -->")
    assert begin, "README.md has no <!-- options --> line"
    assert end, "README.md has no <!-- /options --> line"
    assert block.strip() == option_table(), (
        "README.md's option table is not that of lb/settings.py; put this between its markers: "
        "python -c 'from lb.settings import option_table; print(option_table())'"
    )
