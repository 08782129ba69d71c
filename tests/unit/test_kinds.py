"""From the text of an option to its value: what is accepted, and what is said of the rest."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lb import kinds
from lb.kinds import Kind

POSITIVE = kinds.duration(zero=False)
ZERO_OR_MORE = kinds.duration(zero=True)
COLOUR = kinds.choice("colour", ("red", "green"))
EVERY_KIND = [
    POSITIVE,
    ZERO_OR_MORE,
    COLOUR,
    kinds.SIZE,
    kinds.PORT,
    kinds.COUNT,
    kinds.BOOLEAN,
    kinds.NAME,
    kinds.FILE,
    kinds.HOST,
    kinds.URL,
    kinds.TARGET_QPS,
]


def refusal(kind: Kind, text: str) -> str:
    with pytest.raises(ValueError) as caught:
        kind.parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20", 20.0),
        ("20s", 20.0),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("20 s", 20.0),
    ],
)
def test_a_duration_is_in_seconds(text: str, seconds: float) -> None:
    value = POSITIVE.parse(text)
    assert value == seconds
    assert isinstance(value, float)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-5s",
        "+5s",
        "nan",
        "inf",
        "Infinity",
        "1e3",
        "1,5s",
        "5s5s",
        "5.s",
        "9" * 400,
        "٣s",
    ],
)
def test_what_is_no_duration(text: str) -> None:
    assert refusal(POSITIVE, text).endswith("is no duration")


@pytest.mark.parametrize("unit", ["d", "S", "sec", "µs", "MiB"])
def test_an_unknown_unit_of_time_is_named_and_the_known_ones_are_listed(unit: str) -> None:
    assert refusal(POSITIVE, f"5{unit}") == f"'5{unit}' has the unknown unit '{unit}'"
    assert "ms, s, m, h" in POSITIVE.accepted


@pytest.mark.parametrize("text", ["0", "0s", "0.000ms"])
def test_a_duration_of_0_passes_only_where_it_means_something(text: str) -> None:
    assert ZERO_OR_MORE.parse(text) == 0
    assert refusal(POSITIVE, text) == f"'{text}' is not more than 0"
    assert "0 or more" in ZERO_OR_MORE.accepted
    assert "more than 0" in POSITIVE.accepted


@given(
    st.integers(0, 999_999_999), st.sampled_from([("ms", 1e-3), ("s", 1), ("m", 60), ("h", 3600)])
)
def test_every_duration_scales_with_its_unit(number: int, unit: tuple[str, float]) -> None:
    name, factor = unit
    assert ZERO_OR_MORE.parse(f"{number}{name}") == pytest.approx(number * factor)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("7B", 7),
        ("2KB", 2000),
        ("16MB", 16_000_000),
        ("1GB", 10**9),
        ("512KiB", 512 << 10),
        ("16MiB", 16 << 20),
        ("1GiB", 1 << 30),
        ("1 GiB", 1 << 30),
        ("999999999999999", 999_999_999_999_999),  # beyond what a float would keep exactly in GiB
    ],
)
def test_a_size_is_in_bytes(text: str, size: int) -> None:
    value = kinds.SIZE.parse(text)
    assert value == size
    assert isinstance(value, int)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5MiB", "nan", "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    assert refusal(kinds.SIZE, text).endswith("is no size")


@pytest.mark.parametrize("unit", ["Mi", "mib", "TB", "s"])
def test_an_unknown_unit_of_size_is_named_and_the_known_ones_are_listed(unit: str) -> None:
    assert refusal(kinds.SIZE, f"5{unit}") == f"'5{unit}' has the unknown unit '{unit}'"
    assert "B, KB, MB, GB, KiB, MiB, GiB" in kinds.SIZE.accepted


@pytest.mark.parametrize("port", [0, 1, 65535])
def test_a_port(port: int) -> None:
    assert kinds.PORT.parse(str(port)) == port


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("65536", "65536 is out of range"),
        ("", "'' is no whole number"),
        ("-1", "'-1' is no whole number"),
        ("http", "'http' is no whole number"),
        ("80.0", "'80.0' is no whole number"),
        ("tcp://10.0.0.1:80", "'tcp://10.0.0.1:80' is no whole number"),
    ],
)
def test_what_is_no_port(text: str, fault: str) -> None:
    assert refusal(kinds.PORT, text) == fault


def test_a_count_begins_at_1() -> None:
    assert kinds.COUNT.parse("1") == 1
    assert refusal(kinds.COUNT, "0") == "0 is out of range"
    assert refusal(kinds.COUNT, "1" * 5000).endswith("is no whole number")


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "True", "YES"])
def test_yes(text: str) -> None:
    assert kinds.BOOLEAN.parse(text) is True


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "False", "NO"])
def test_no(text: str) -> None:
    assert kinds.BOOLEAN.parse(text) is False


def test_neither_yes_nor_no() -> None:
    assert refusal(kinds.BOOLEAN, "maybe") == "'maybe' is neither yes nor no"


def test_a_choice_hints_at_a_near_miss_only() -> None:
    assert COLOUR.parse("red") == "red"
    assert refusal(COLOUR, "gren") == "'gren' is no colour, did you mean green?"
    assert refusal(COLOUR, "xyzzy") == "'xyzzy' is no colour"
    assert refusal(COLOUR, "") == "'' is no colour"
    assert (COLOUR.metavar, COLOUR.accepted) == ("red|green", "red, green")


@pytest.mark.parametrize("kind", [kinds.NAME, kinds.FILE])
def test_text_is_printable_and_not_empty(kind: Kind) -> None:
    assert kind.parse("my service/äöü") == "my service/äöü"
    assert refusal(kind, "") == "it is empty"
    assert refusal(kind, "a\nb") == r"'a\nb' holds unprintable characters"
    assert refusal(kind, "\udcff") == r"'\udcff' holds unprintable characters"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::", "::1", "localhost", "a-b.c_d.e."])
def test_a_host(host: str) -> None:
    assert kinds.HOST.parse(host) == host


@pytest.mark.parametrize("text", ["", "*", "[::]", "a b", "-a", "host:80", "http://host", "a/b"])
def test_what_is_no_host(text: str) -> None:
    assert refusal(kinds.HOST, text) == f"{text!r} is no address and no host name"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:20001", "http://127.0.0.1:20001"),
        ("https://controller.ns.svc:20001/", "https://controller.ns.svc:20001"),
        ("http://host", "http://host"),
        ("http://host/some/prefix/", "http://host/some/prefix"),
        ("http://[::1]:20001", "http://[::1]:20001"),
        ("127.0.0.1:20001", "http://127.0.0.1:20001"),
        ("localhost:20001/prefix", "http://localhost:20001/prefix"),
    ],
)
def test_a_url_loses_its_last_slash_and_may_leave_out_http(text: str, url: str) -> None:
    assert kinds.URL.parse(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "not a url",
        "20001",
        "http://",
        "http://:80",
        "http://host:",
        "http://host:0",
        "http://host:99999",
        "http://host:port",
        "http://[::1",
        "http://[zz]:1",
        "http://::1:20001",
        "http://ho st:1",
        "http://host:1/a b",
        "http://host:1/\n",
        "ht\ttp://host:1",
        "http://hôst:1",
    ],
)
def test_what_is_no_url(text: str) -> None:
    assert refusal(kinds.URL, text) in {
        f"{text!r} is no URL",
        f"{text!r} is no http or https URL",
    }


def test_a_url_of_another_scheme() -> None:
    assert refusal(kinds.URL, "ftp://host:1") == "'ftp://host:1' is no http or https URL"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("http://user:hunter2@host:1", "it holds a user name or password"),
        ("user:hunter2@host:1", "it holds a user name or password"),
        ("http://host:1/?key=hunter2", "it holds a query or a fragment"),
        ("http://host:1/#hunter2", "it holds a query or a fragment"),
        ("ftp://user:hunter2@host:1", "it is no http or https URL"),
        ("http://user:hunter2@host:99999", "it is no URL"),
        ("http://[x?key=hunter2", "it is no URL"),
    ],
)
def test_what_may_be_a_secret_in_a_url_is_not_repeated(text: str, fault: str) -> None:
    assert refusal(kinds.URL, text) == fault


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2.0),
        ("2.5", 2.5),
        ('{"A100": 2, "H100:8": 7.5}', {"A100": 2.0, "H100:8": 7.5}),
    ],
)
def test_a_target_qps(text: str, value: object) -> None:
    assert kinds.TARGET_QPS.parse(text) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "'' is no JSON"),
        ("{'A100': 2}", "\"{'A100': 2}\" is no JSON"),
        ("[" * 100_000, f"'{'[' * 57}...' is no JSON"),
        ("{}", "it names no accelerator"),
        ("null", "a target QPS in it is no number"),
        ("true", "a target QPS in it is no number"),
        ("[1]", "a target QPS in it is no number"),
        ('{"A100": "2"}', "a target QPS in it is no number"),
        ('{"A100": {"x": 1}}', "a target QPS in it is no number"),
        ("0", "a target QPS in it is not more than 0, or not finite"),
        ('{"A100": 1, "H100": -1}', "a target QPS in it is not more than 0, or not finite"),
        ("NaN", "a target QPS in it is not more than 0, or not finite"),
        ("Infinity", "a target QPS in it is not more than 0, or not finite"),
        ("1" + "0" * 400, "a target QPS in it is not more than 0, or not finite"),
    ],
)
def test_what_is_no_target_qps(text: str, fault: str) -> None:
    assert refusal(kinds.TARGET_QPS, text) == fault


@given(
    st.sampled_from(EVERY_KIND),
    st.text() | st.from_regex(r"[0-9.]{1,12}(ms|s|m|h|MiB)?|(http:)?//[ -~]*", fullmatch=True),
)
@example(kinds.HOST, "\ud800")
@example(kinds.URL, "9" * 5000)
def test_any_text_gives_a_finite_value_or_one_short_line(kind: Kind, text: str) -> None:
    fault = ""
    try:
        value = kind.parse(text)
    except ValueError as error:
        value, fault = None, str(error)
    assert fault.isprintable()
    assert len(fault) < 700
    assert not isinstance(value, float) or math.isfinite(value)
