"""The order of the tests: the files that take longest first, so that no worker is left with one at the end.

`make test` gives each of its workers a file at a time, in this order. Ctrl-C works in all of them.
"""

from __future__ import annotations

import signal

import pytest

# A shell lets the jobs that it starts with "&" ignore Ctrl-C, and so do the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = [  # those that take ten seconds or more
    "trust/test_same_bits.py",
    "trust/test_network.py",
    "native/test_compiled.py",
    "examples/test_demo.py",
    "trust/test_ranks.py",
    "test_docs.py",
    "trust/test_faults.py",
    "planning/test_planning.py",
    "faces/dynamicemb/test_twins.py",
    "examples/test_examples.py",
    "clients/test_torch_clients.py",
    "clients/test_sok.py",
    "serving/test_server.py",
    "faces/torchrec_dynamic_embedding/test_failover.py",
    "checkpoint/test_many_ranks.py",
    "distributed/test_sharded_modules.py",
    "checkpoint/test_remote.py",
    "checkpoint/test_command_line.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Then those that are slow or start several processes, then the rest. A file stays in one piece."""
    late = {
        item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("multirank")
    }

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.nodeid.partition("::")[0].removeprefix("tests/")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.path not in late

    items.sort(key=place)
