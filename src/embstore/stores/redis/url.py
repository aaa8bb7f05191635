"""The URL of a Redis store, checked option by option. Nothing here ever shows a password.

    redis://[user[:password]@]host[:port][,host[:port]…][/db][?option=value&…]

    prefix        text before every key                                   ""
    layout        compatible: one key for each tensor; packed: one for each id
    num_threads   connections that are used side by side                  1
    chunk_size    keys in one command                                     512
    timeout       of a call with all of its answers: 500ms, 10s, 2m       10s
    retry_limit   a failing server is tried for timeout x retry_limit     3
    heartbeat     a connection that rested for longer is checked first    100s
    db            number of the database                                  0
    cluster       1: the hosts are nodes of a Redis Cluster               0
    sentinel      name of the service; the hosts are Sentinels
    sentinel_user, sentinel_password    of the Sentinels; those before @ are the servers'
    ca_file       certificates that sign the server's (rediss://)
    cert_file, key_file    our own certificate (rediss://)
    verify        0: do not check the server's certificate (rediss://)    1

`rediss` instead of `redis` encrypts. Options are separated by & or &&.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import unquote

SCHEMES = ("redis", "rediss")
LAYOUTS = ("compatible", "packed")
HIDDEN = "; the text is not shown, since it may be part of a password, in which ? should be written as %3F"


@dataclass(frozen=True)
class RedisUrl:
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    prefix: str = ""
    layout: str | None = None
    num_threads: int = 1
    chunk_size: int = 512
    timeout: float = 10.0
    retry_limit: int = 3
    heartbeat: float = 100.0
    db: int = 0
    cluster: bool = False
    sentinel: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True

    @property
    def where(self) -> str:
        """For messages: hosts and database, without user and password."""
        return f"redis {','.join(f'{host}:{port}' for host, port in self.hosts)} db {self.db}"


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
            raise ValueError(f"an integer of at least {least}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|)", text)
    seconds = float(match[1]) * {"ms": 0.001, "m": 60.0}.get(match[2], 1.0) if match else 0.0
    if seconds <= 0:
        raise ValueError("a duration above 0 such as 500ms, 10s or 2m")
    return seconds


def _flag(text: str) -> bool:
    if text not in ("0", "1", "false", "true"):
        raise ValueError("0 or 1")
    return text in ("1", "true")


def _layout(text: str) -> str:
    if text not in LAYOUTS:
        raise ValueError(f"one of {list(LAYOUTS)}")
    return text


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "prefix": unquote,
    "layout": _layout,
    "num_threads": _integer(1),
    "chunk_size": _integer(1),
    "timeout": _seconds,
    "retry_limit": _integer(1),
    "heartbeat": _seconds,
    "db": _integer(0),
    "cluster": _flag,
    "sentinel": unquote,
    "sentinel_user": unquote,
    "sentinel_password": unquote,
    "ca_file": unquote,
    "cert_file": unquote,
    "key_file": unquote,
    "verify": _flag,
}
assert set(_OPTIONS) < {f.name for f in fields(RedisUrl)}


def _host(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::([0-9]+))?", text)
    if match is None or not 0 < int(match[2] or default_port) < 65536:
        if ":" in text:  # "user:password" without a host looks like this
            raise ValueError(
                "a host of the redis URL should be name[:port] with a port below 65536, or [IPv6][:port]; "
                "the text is not shown, since it may be a password"
            )
        raise ValueError(f"a host of the redis URL should be name[:port] but is: {text!r}")
    return unquote(match[1].strip("[]")), int(match[2] or default_port)


def parse_redis_url(url: str) -> RedisUrl:
    """
    >>> parse_redis_url("redis://127.0.0.1:6379/?prefix=model&&timeout=500ms").timeout
    0.5
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ValueError(f"the scheme of a redis URL should be one of {list(SCHEMES)}")
    rest, _, query = rest.partition("?")
    credentials, at, rest = rest.rpartition("@")
    place, _, path = rest.partition("/")
    user, colon, password = credentials.partition(":")
    # An @ behind the first ? may end a password that has a ? in it; then nothing of it is shown.
    may_be_password = not at and "@" in query
    found: dict[str, Any] = {}
    if at:
        found.update(user=unquote(user) or None, password=unquote(password) if colon else None)
    if path:
        found["db"] = _option("db", path, may_be_password)
    for part in filter(None, re.split("&+", query)):
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            shown = HIDDEN if may_be_password else f" but is: {name!r}"
            raise ValueError(f"an option of a redis URL should be one of {sorted(_OPTIONS)}{shown}")
        found[name] = _option(name, value, may_be_password)
    sentinel, cluster = found.get("sentinel"), found.get("cluster")
    if cluster and (sentinel or found.get("db")):
        raise ValueError("cluster=1 should come without sentinel and with db 0, which is all a cluster has")
    if sentinel is None and ("sentinel_user" in found or "sentinel_password" in found):
        raise ValueError("sentinel_user and sentinel_password should come with sentinel, but there is none")
    port = 26379 if sentinel else 6379
    return RedisUrl(tuple(_host(text, port) for text in place.split(",")), scheme == "rediss", **found)


def _option(name: str, value: str, may_be_password: bool) -> Any:
    try:
        return _OPTIONS[name](value)
    except ValueError as wanted:
        shown = HIDDEN if may_be_password else f" but is: {value!r}"
        raise ValueError(f"{name} in a redis URL should be {wanted}{shown}") from None
