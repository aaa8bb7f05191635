"""URLs of Redis stores: what is accepted, and how a mistake is named."""

import pytest

from embstore.stores.redis.url import parse_redis_url
from embstore.stores.urls import open_store


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://h", {"hosts": (("h", 6379),), "db": 0, "prefix": "", "tls": False, "user": None}),
        ("redis://127.0.0.1:7000/", {"hosts": (("127.0.0.1", 7000),)}),
        ("redis://h/?", {"timeout": 10.0, "retry_limit": 3, "num_threads": 1}),
        ("redis://my-host/3?prefix=my-model", {"hosts": (("my-host", 6379),), "db": 3, "prefix": "my-model"}),
        ("redis://h/?prefix=m&&db=3", {"prefix": "m", "db": 3}),
        ("redis://h/?prefix=m&db=3&&", {"prefix": "m", "db": 3}),
        ("redis://h?timeout=500ms&heartbeat=2m", {"timeout": 0.5, "heartbeat": 120.0}),
        ("redis://h/?timeout=1.5", {"timeout": 1.5}),
        ("redis://[::1]:99/", {"hosts": (("::1", 99),)}),
        ("rediss://u:p%40ss@h/?verify=0", {"tls": True, "user": "u", "password": "p@ss", "verify": False}),
        ("redis://:only@h", {"user": None, "password": "only"}),
        ("redis://a:1,b:2/?cluster=1", {"hosts": (("a", 1), ("b", 2)), "cluster": True}),
        ("redis://a,b/?sentinel=rows", {"hosts": (("a", 26379), ("b", 26379)), "sentinel": "rows"}),
        (
            "redis://h/?layout=packed&chunk_size=9&num_threads=4&retry_limit=1",
            {"layout": "packed", "chunk_size": 9},
        ),
    ],
)
def test_a_url_is_read(url, found):
    parsed = parse_redis_url(url)
    assert {name: getattr(parsed, name) for name in found} == found


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://h/?colour=red", "should be one of .*chunk_size.* but is: 'colour'"),
        ("redis://h/?timeout=3d", "timeout in a redis URL should be a duration .* but is: '3d'"),
        ("redis://h/?timeout=0", "but is: '0'"),
        (
            "redis://h/?num_threads=0",
            "num_threads in a redis URL should be an integer of at least 1 but is: '0'",
        ),
        ("redis://h/x", "db in a redis URL should be an integer of at least 0 but is: 'x'"),
        ("redis://h/?layout=loose", "should be one of .* but is: 'loose'"),
        ("redis://h/?verify=maybe", "verify in a redis URL should be 0 or 1 but is: 'maybe'"),
        ("redis://h:99999/", "should be name.:port. with a port below 65536.*not shown"),
        ("redis://h/?sentinel_password=x", "should come with sentinel"),
        ("redis:///?db=1", "but is: ''"),
        ("redis://h/1?cluster=1", "cluster=1 should come without sentinel"),
        ("http://h", "the scheme of a redis URL should be one of"),
    ],
)
def test_a_mistake_is_named(url, text):
    with pytest.raises(ValueError, match=text):
        parse_redis_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hidden@h:x/",
        "redis://u:hidden@h/?a=1",
        "redis://u:hidden@h/y",
        "redis://u:hidden",  # the host was forgotten
        "redis://u:hidden/0?prefix=x",
        "redis://u:x?hidden@h/",  # a ? that should be %3F
        "redis://u:hidden?x@h/",
        "redis://u:1?hidden@h/",
        "redis://u:1?db=hidden@h/",
        "redis://u:1?x&hidden=1@h/",
        "u:hidden@redis://h",
    ],
)
def test_no_message_shows_the_password(url):
    with pytest.raises(ValueError) as info:
        parse_redis_url(url)
    assert "hidden" not in str(info.value)
    with pytest.raises(ValueError) as info:
        open_store(url, table="t", tensor_bytes=[4])
    assert "hidden" not in str(info.value)


def test_neither_does_the_parsed_url():
    assert "hidden" not in repr(parse_redis_url("redis://h/?sentinel=s&sentinel_password=hidden"))
    parsed = parse_redis_url("redis://u:hidden@h/4")
    assert "hidden" not in repr(parsed) and parsed.where == "redis h:6379 db 4"
