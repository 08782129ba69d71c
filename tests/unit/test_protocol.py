"""The sync call's encoding and parsing, without a socket."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_client.errors import SyncError
from controller_client.protocol import (
    MAX_SHOWN_LENGTH,
    SYNC_PATH,
    ReadyList,
    ReadyReplica,
    encode_sync,
    parse_sync,
)

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{1,8}){0,2}", fullmatch=True)
HOSTS = st.one_of(
    NAMES,
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def info(*urls: str, accelerator: object = "A100") -> bytes:
    return json.dumps({"replica_info": {url: {"gpu_type": accelerator} for url in urls}}).encode()


def urls(*entries: object) -> bytes:
    return json.dumps({"ready_replica_urls": entries}).encode()


def parsed_urls(body: bytes) -> list[str]:
    return [replica.url for replica in parse_sync(body).replicas]


def rejected(body: bytes) -> str:
    with pytest.raises(SyncError) as caught:
        parse_sync(body)
    assert caught.value.result == "bad_payload"
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


# What is sent


def test_sync_reports_arrivals_in_ascending_order() -> None:
    assert SYNC_PATH == "/controller/load_balancer_sync"
    assert json.loads(encode_sync([3.5, 1.25, 2])) == {
        "request_aggregator": {"timestamps": [1.25, 2, 3.5]}
    }


def test_sync_without_arrivals_reports_an_empty_list() -> None:
    assert json.loads(encode_sync([])) == {"request_aggregator": {"timestamps": []}}


@given(st.lists(st.floats(min_value=0, max_value=4e9)))
def test_timestamps_arrive_to_the_last_digit(timestamps: list[float]) -> None:
    sent = json.loads(encode_sync(timestamps))["request_aggregator"]["timestamps"]
    assert sent == sorted(timestamps)


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), float("-inf")])
def test_a_timestamp_that_is_not_finite_is_refused(timestamp: float) -> None:
    with pytest.raises(ValueError):
        encode_sync([1.0, timestamp])


# Both shapes of answer


def test_replica_info_names_replicas_and_accelerators_in_order() -> None:
    body = json.dumps(
        {"replica_info": {"http://b:2": {"gpu_type": "H100"}, "http://a:1": {"gpu_type": "A100:8"}}}
    ).encode()
    assert parse_sync(body) == ReadyList(
        replicas=(ReadyReplica("http://b:2", "H100"), ReadyReplica("http://a:1", "A100:8")),
        skipped=(),
    )


def test_older_answers_name_urls_alone() -> None:
    assert parse_sync(urls("http://b:2", "http://a:1")) == ReadyList(
        replicas=(ReadyReplica("http://b:2", None), ReadyReplica("http://a:1", None)), skipped=()
    )


def test_replica_info_counts_where_both_are_present() -> None:
    body = b'{"ready_replica_urls": ["http://old:1"], "replica_info": {"http://new:1": {}}}'
    assert parsed_urls(body) == ["http://new:1"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"replica_info": {}}',
        b'{"ready_replica_urls": []}',
        b'{"replica_info": {}, "ready_replica_urls": []}',
        b' {"replica_info": {}, "more": 1}\r\n',
    ],
)
def test_an_empty_list_is_an_answer(body: bytes) -> None:
    assert parse_sync(body) == ReadyList(replicas=(), skipped=())


@pytest.mark.parametrize(
    "facts",
    [
        None,
        {},
        "A100",
        ["A100"],
        {"gpu_type": None},
        {"gpu_type": 7},
        {"gpu_type": ""},
        {"gpu_type": "unknown"},
        {"gpu_type": "A100\n"},
        {"gpu_type": "\ud800"},
        {"gpu_type": "x" * 65},
    ],
)
def test_odd_facts_cost_the_accelerator_not_the_replica(facts: object) -> None:
    body = json.dumps({"replica_info": {"http://a:1": facts}}).encode()
    assert parse_sync(body) == ReadyList((ReadyReplica("http://a:1", None),), ())


# URLs


@pytest.mark.parametrize(
    ("url", "normalised"),
    [
        ("http://10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("http://10.0.0.1:8080/", "http://10.0.0.1:8080"),
        ("HTTP://Node-1.Example.COM:08080", "http://node-1.example.com:8080"),
        ("http://pod_1.ns.svc:1", "http://pod_1.ns.svc:1"),
        ("http://a", "http://a:80"),
        ("https://a", "https://a:443"),
        ("https://a:80", "https://a:80"),
        ("http://[::1]:65535", "http://[::1]:65535"),
        ("http://[2001:DB8:0:0:0:0:0:1]/", "http://[2001:db8::1]:80"),
    ],
)
def test_urls_are_normalised(url: str, normalised: str) -> None:
    assert parsed_urls(info(url)) == [normalised]
    assert parsed_urls(urls(url)) == [normalised]
    assert parsed_urls(urls(normalised)) == [normalised]


BAD_URLS = [
    "",
    "a:1",
    "//a:1",
    "ftp://a:1",
    "http:/a:1",
    "http://",
    "http://:1",
    "http://a:",
    "http://a:0",
    "http://a:65536",
    "http://a:-1",
    "http://a:1:2",
    "http://a:\u0661",
    "http://a:1/path",
    "http://a:1//",
    "http://a:1?",
    "http://a:1?token=hidden",
    "http://a:1#hidden",
    "http://user@a:1",
    "http://user:hidden@a:1",
    "http://user:hid?den@a:1",
    "http://user:hid/den@a:1",
    "http://a\\b:1",
    "http://a b:1",
    " http://a:1",
    "http://a:1\n",
    "http://a\r\nHost: b:1",
    "http://a\0:1",
    "http://ä:1",
    "http://\u212a:1",
    "http://a..b:1",
    "http://.:1",
    "http://" + "a" * 64 + ":1",
    "http://" + "a." * 126 + "aa:1",
    "http://1.2.3:1",
    "http://1.2.3.256:1",
    "http://2130706433:1",
    "http://[::1:1",
    "http://[::g]:1",
    "http://[:::]:1",
    "http://[1.2.3.4]:1",
    "http://[fe80::1%eth0]:1",
    "http://::1:1",
    "http://\ud800:1",
    "null",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_costs_only_itself(url: str) -> None:
    ready = parse_sync(info("http://a:1", url, "http://b:2"))
    assert [replica.url for replica in ready.replicas] == ["http://a:1", "http://b:2"]
    assert len(ready.skipped) == 1
    assert "hid" not in ready.skipped[0]


@pytest.mark.parametrize("entry", [None, 1, 1.5, True, ["http://a:1"], {"url": "http://a:1"}])
def test_an_entry_that_is_no_text_costs_only_itself(entry: object) -> None:
    ready = parse_sync(urls(entry, "http://a:1"))
    assert [replica.url for replica in ready.replicas] == ["http://a:1"]
    assert ready.skipped == (f"a value of type {type(entry).__name__}",)


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_list_of_bad_urls_alone_is_no_empty_list(url: str) -> None:
    message = rejected(info(url))
    assert message.startswith("none of the 1 replicas in the controller's answer has a usable URL")
    assert "hid" not in message


def test_replicas_named_twice_are_merged() -> None:
    body = json.dumps(
        {
            "replica_info": {
                "http://A": {"gpu_type": "unknown"},
                "http://b:2": {"gpu_type": "H100"},
                "http://a:80/": {"gpu_type": "A100"},
                "http://a:80": {"gpu_type": "L4"},
            }
        }
    ).encode()
    assert parse_sync(body).replicas == (
        ReadyReplica("http://a:80", "A100"),
        ReadyReplica("http://b:2", "H100"),
    )


@given(st.lists(st.text(max_size=200), min_size=1))
def test_skipped_entries_are_short_and_printable(entries: list[str]) -> None:
    for shown in parse_sync(urls("http://a:1", *entries)).skipped:
        assert shown.isascii()
        assert shown.isprintable()
        assert len(shown) <= MAX_SHOWN_LENGTH * len("\\U00000000") + 2


@given(
    st.sampled_from(["http", "https"]),
    HOSTS,
    st.none() | st.integers(min_value=1, max_value=65535),
    st.sampled_from(["", "/"]),
)
def test_every_plain_url_is_taken(scheme: str, host: str, port: int | None, end: str) -> None:
    explicit = port or {"http": 80, "https": 443}[scheme]
    url = f"{scheme}://{host}{'' if port is None else f':{port}'}{end}"
    assert parsed_urls(urls(url)) == [f"{scheme}://{host}:{explicit}"]


# Answers that are no list


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"true",
        b"7",
        b'"text"',
        b"[]",
        b'["http://a:1"]',
        b"<html>502 Bad Gateway</html>",
        b"{}",
        b'{"replica_info": {"http://a:1": {}}',
        b'{"replica_info": {}} {}',
        b'{"replica_info": null}',
        b'{"replica_info": []}',
        b'{"replica_info": "http://a:1"}',
        b'{"replica_info": 1, "ready_replica_urls": ["http://a:1"]}',
        b'{"ready_replica_urls": null}',
        b'{"ready_replica_urls": {}}',
        b'{"ready_replica_urls": "http://a:1"}',
        b'{"detail": "Not Found"}',
        b'{"replica_info": {}, "more": NaN}',
        b'{"replica_info": {}, "more": -Infinity}',
        b'{"replica_info": {}, "more": ' + b"1" * 5000 + b"}",
        b"\xff\xfe{\x00}\x00",
        '{"replica_info": {}}'.encode("utf-16"),
        '{"replica_info": {}}'.encode("utf-8-sig"),
        b'{"replica_info": {"http://\xff:1": {}}}',
        b"[" * 200_000,
        b'{"replica_info":' * 100_000,
    ],
    ids=lambda body: ascii(body[:40]),
)
def test_what_is_no_ready_list_is_one_error(body: bytes) -> None:
    assert "controller's answer" in rejected(body)


def outcome(body: bytes) -> ReadyList | str:
    try:
        return parse_sync(body)
    except SyncError as error:
        return error.result


@given(st.one_of(st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
def test_junk_never_names_a_replica(body: bytes) -> None:
    assert outcome(body) in ("bad_payload", ReadyList((), ()))


@given(JSON, st.sampled_from(["replica_info", "ready_replica_urls"]))
def test_junk_in_the_right_place_is_no_list(value: object, key: str) -> None:
    empty = {"replica_info": {}, "ready_replica_urls": []}[key]
    expected = ReadyList((), ()) if value == empty else "bad_payload"
    assert outcome(json.dumps({key: value}).encode()) == expected


def test_the_error_says_its_message_and_survives_a_pickle() -> None:
    error = SyncError("timeout", "the controller did not answer within 15 s")
    assert str(error) == "the controller did not answer within 15 s"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.result, copy.message) == (error.result, error.message)
