"""A cluster whose slots move from node to node while rows are read, written and erased."""

import threading

import numpy as np
import pytest
import redis_server

from embstore.stores.redis.store import RedisStore

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING)),
]
SIZES = [12, 4]
UNIVERSE = np.arange(-60, 60)


class Cluster:
    """Three nodes, and the steps in which `redis-cli --cluster reshard` moves a slot."""

    def __init__(self, nodes):
        from redis import Redis

        self.nodes = nodes
        self.clients = [Redis(port=node.port, protocol=2) for node in nodes]
        self.ids = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        self.url = f"redis://{nodes[0].where},{nodes[1].where}/?cluster=1&timeout=5s&"
        self.owners = {}
        for line in nodes[0].cli("cluster", "nodes").splitlines():
            for part in line.split()[8:]:
                first, _, last = part.partition("-")
                for slot in range(int(first), int(last or first) + 1):
                    self.owners[slot] = self.ids.index(line.split()[0])

    def slots(self, store):
        """The slots in which this store has keys, or would have."""
        names = store._layout.names(UNIVERSE)
        return sorted({self.clients[0].execute_command("CLUSTER KEYSLOT", name) for name in names})

    def begin(self, slot):
        source = self.owners[slot]
        target = (source + 1) % len(self.nodes)
        self.clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.ids[source])
        self.clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.ids[target])
        return source, target

    def move_keys(self, slot, source, target, count):
        """Moves up to so many keys of the slot; whether there were any."""
        names = self.clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, count)
        for name in names:
            move = ("MIGRATE", "127.0.0.1", self.nodes[target].port, name, 0, 5000)
            self.clients[source].execute_command(*move)
        return bool(names)

    def finish(self, slot, source, target):
        for node in (target, source, 3 - source - target):
            self.clients[node].execute_command("CLUSTER SETSLOT", slot, "NODE", self.ids[target])
        self.owners[slot] = target

    def move(self, slot):
        places = self.begin(slot)
        while self.move_keys(slot, *places, 1):
            pass
        self.finish(slot, *places)

    def close(self):
        for client in self.clients:
            client.close()
        for node in self.nodes:
            node.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
    nodes = [redis_server.RedisServer(tmp_path_factory.mktemp("node"), *options) for _ in range(3)]
    try:
        for node in nodes:
            node.start()
        redis_server.form_cluster(nodes)
        found = Cluster(nodes)
        assert len(found.owners) == 16384
        yield found
        found.close()
    finally:
        for node in nodes:
            node.stop()


class Oracle:
    """Does the same to a store and to a dict, and compares."""

    def __init__(self, store):
        self.store, self.rows, self._rng = store, {}, np.random.default_rng(0)

    def round(self):
        rng = self._rng
        keys = rng.choice(UNIVERSE, 40, replace=False)
        rows = rng.integers(0, 256, (40, 16), np.uint8)
        self.store.put(keys, rows, np.ones(40, np.uint64))
        self.rows |= {int(key): row.tobytes() for key, row in zip(keys, rows)}
        gone = rng.choice(UNIVERSE, 10, replace=False)
        self.store.erase(gone)
        for key in gone:
            self.rows.pop(int(key), None)
        self.compare()

    def compare(self):
        got, _, found = self.store.get(UNIVERSE)
        assert found.tolist() == [int(key) in self.rows for key in UNIVERSE]
        for key, row in zip(UNIVERSE[found], got[found]):
            assert row.tobytes() == self.rows[int(key)], f"the row of {key}"


@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_slots_that_are_half_moved_lose_no_row(cluster, layout):
    store = RedisStore(f"{cluster.url}prefix=half&layout={layout}", table="t", tensor_bytes=SIZES)
    oracle = Oracle(store)
    oracle.round()
    slots = cluster.slots(store)[::3]
    places = {slot: cluster.begin(slot) for slot in slots}
    oracle.round()  # rows that are not at the source any more, or not yet, are asked for at the target
    for slot in slots[::2]:
        while cluster.move_keys(slot, *places[slot], 100):
            pass
    oracle.round()
    for slot in slots:
        while cluster.move_keys(slot, *places[slot], 100):
            pass
        cluster.finish(slot, *places[slot])
    oracle.round()
    assert len(store) == len(oracle.rows)


@pytest.mark.parametrize("layout", ["compatible", "packed"])
def test_rows_stay_what_they_are_while_slots_move(cluster, layout):
    url = f"{cluster.url}prefix=moving&layout={layout}&chunk_size=31&num_threads=2"
    store = RedisStore(url, table="t", tensor_bytes=SIZES)
    oracle, slots = Oracle(store), cluster.slots(store)
    stopping, moved, failures = threading.Event(), [], []

    def keep_moving():
        try:
            while not stopping.is_set():
                slot = slots[len(moved) % len(slots)]
                cluster.move(slot)
                moved.append(slot)
        except Exception as error:
            failures.append(error)

    mover = threading.Thread(target=keep_moving)
    mover.start()
    try:
        rounds = 0
        while (rounds < 30 or len(moved) < 50) and not failures:
            oracle.round()
            rounds += 1
    finally:
        stopping.set()
        mover.join(30)
    assert not failures and not mover.is_alive()
    oracle.compare()
    assert len(store) == len(oracle.rows)
