"""Short versions of trust.network and trust.failover: two hosts and a bad wire, a Cluster whose master
dies."""

import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import process_groups
import pytest
from redis_server import MISSING, RedisServer

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import hosts
from trust.failover import Load

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def two_hosts():
    reason = hosts.unavailable()
    if reason:
        pytest.skip(reason)


def run(*arguments):
    output = process_groups.run(["env", "-C", str(ROOT), sys.executable, "-m", *arguments], 220)
    assert output.rstrip().endswith("0 broken promises")
    return output


@pytest.mark.timeout(240)
def test_ranks_of_two_hosts_raise_when_the_wire_is_cut_and_resume_to_the_same_bits(two_hosts):
    output = run("trust.network", "--part", "training", "--ranks", "1")
    assert re.search(r"resumed from dump \d to the same bits", output)


@pytest.mark.timeout(240)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_store_over_a_wire_that_delays_loses_and_breaks_keeps_what_it_acknowledged(two_hosts):
    assert "10 rounds" in run("trust.network", "--part", "redis", "--rounds", "10")


@pytest.mark.timeout(240)
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs redis-cli")
def test_a_cluster_that_replaces_a_killed_master_under_load_keeps_what_was_replicated():
    assert "replaced after" in run("trust.failover", "--kind", "cluster-kill", "--rounds", "1")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_load_of_a_failover_opens_its_store_again_when_servers_do_not_answer_in_time(tmp_path):
    server = RedisServer(tmp_path).start()
    again = threading.Timer(6, server.signal, [signal.SIGCONT])
    try:
        server.signal(signal.SIGSTOP)
        again.start()
        load = Load(f"redis://{server.where}/?db=0")
        assert load.raised >= 1 and not load.errors
        assert not load.versions().any()
    finally:
        again.cancel()
        server.stop()
