"""A master that dies in mid-run behind a Sentinel: training goes on with the replica, and no row is lost."""

import contextlib
import subprocess
import time

import pytest
import redis_server
from faces.torchrec_dynamic_embedding import twins

import torchrec_dynamic_embedding as tde

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING)),
]


def wait_until(condition, what, seconds=40):
    deadline = time.monotonic() + seconds
    while True:
        # A Sentinel that changes the role of a server closes its connections, redis-cli's among them.
        with contextlib.suppress(subprocess.CalledProcessError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def facts(server, section="replication"):
    """What INFO says, by name."""
    lines = server.cli("info", section).splitlines()
    return dict(line.strip().split(":", 1) for line in lines if ":" in line)


class Pair:
    """A master, its replica and a Sentinel that replaces the one by the other."""

    def __init__(self, start, directory):
        self.master = start()
        self.replica = start("--replicaof", "127.0.0.1", str(self.master.port))
        wait_until(lambda: facts(self.replica)["master_link_status"] == "up", "the replica should connect")
        self.sentinel = redis_server.RedisServer(directory, sentinel=True)
        (directory / "sentinel.conf").write_text(
            f"port {self.sentinel.port}\nbind 127.0.0.1\n"
            f"sentinel monitor rows 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds rows 1000\nsentinel failover-timeout rows 3000\n"
        )
        self.sentinel.start()
        wait_until(lambda: self.known_replicas() == 1, "the Sentinel should find the replica")

    def known_replicas(self):
        reply = self.sentinel.cli("sentinel", "master", "rows").splitlines()
        return int(reply[reply.index("num-slaves") + 1])

    def wait_for_replica(self):
        """Until the replica has all that the master has: a write does not wait for it."""
        wait_until(
            lambda: facts(self.replica)["master_repl_offset"] == facts(self.master)["master_repl_offset"],
            "the replica should catch up",
        )

    def kill_master(self):
        self.wait_for_replica()
        self.master.kill()

    def promoted(self):
        return facts(self.replica)["role"] == "master"


@pytest.fixture
def pair(server, tmp_path):
    (tmp_path / "sentinel").mkdir()
    found = Pair(server, tmp_path / "sentinel")
    yield found
    found.sentinel.stop()


@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_a_replica_is_promoted_within_the_limit_and_training_does_not_notice(pair, layout):
    url = f"redis://{pair.sentinel.where}/?sentinel=rows&prefix=s&layout={layout}"
    run = twins.Run(f"{url}&timeout=2s&retry_limit=20", num_prefetch=0)
    run.train(6)
    pair.kill_master()
    run.train(12)
    assert pair.promoted()
    pair.master.start()  # empty; the Sentinel makes it a replica of the other
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(url, run.twin, run.data, "row_wise", "adagrad")
    wait_until(lambda: facts(pair.master)["role"] == "slave", "the old master should follow the new one")
    twins.compare_rows(url, run.twin, run.data, "row_wise", "adagrad")


def test_without_a_master_it_raises_within_the_limit_and_goes_on_with_the_new_one(pair):
    url = f"redis://{pair.sentinel.where}/?sentinel=rows&prefix=q"
    run = twins.Run(f"{url}&timeout=200ms&retry_limit=2", num_prefetch=0)
    run.train(6)
    pair.kill_master()
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="redis"):
        run.train(len(run.data))
    assert time.monotonic() - begin < 30
    wait_until(pair.promoted, "the replica should be promoted")
    wait_until(
        lambda: str(pair.replica.port) in pair.sentinel.cli("sentinel", "get-master-addr-by-name", "rows"),
        "the Sentinel should name the new master",
    )
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(url, run.twin, run.data, "row_wise", "adagrad")


def test_a_master_that_was_degraded_while_connections_to_it_are_open_is_left(pair):
    """`sentinel failover`: the old master lives on as a replica, which refuses writes."""
    url = f"redis://{pair.sentinel.where}/?sentinel=rows&prefix=d&timeout=2s&retry_limit=20"
    run = twins.Run(url, num_prefetch=0)
    run.train(6)
    pair.wait_for_replica()

    def changed():
        if (
            not pair.promoted()
        ):  # asked again: a Sentinel gives up after 3 s, and refuses while it still tries
            pair.sentinel.cli("sentinel", "failover", "rows")
        return pair.promoted() and facts(pair.master)["role"] == "slave"

    wait_until(changed, "both should change roles")
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(url, run.twin, run.data, "row_wise", "adagrad")
