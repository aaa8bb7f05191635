"""A server that fails in mid-run: an exception or a successful retry, in bounded time, and no row is lost."""

import signal
import threading
import time

import numpy as np
import pytest
import redis_server
from faces.torchrec_dynamic_embedding import twins
from faces.torchrec_dynamic_embedding.models import scattered, trainer
from ports import free_port

import torchrec_dynamic_embedding as tde

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING)),
]
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
QUICK = "timeout=300ms&retry_limit=2"


def raises_in_time(run, error, seconds, match=None):
    begin = time.monotonic()
    with pytest.raises(error, match=match) as info:
        run.train(len(run.data))
    assert time.monotonic() - begin < seconds
    return str(info.value)


@pytest.mark.parametrize("num_prefetch", [0, 3])
def test_a_server_that_is_killed_raises_and_training_goes_on_once_it_is_back(server, num_prefetch):
    redis = server(*DURABLE)
    run = twins.Run(f"redis://{redis.where}/?prefix=k&{QUICK}", num_prefetch)
    run.train(6)
    redis.kill()
    text = raises_in_time(run, ConnectionError, 30)
    assert redis.where in text
    with pytest.raises(ConnectionError):
        tde.save(run.ours.model)
    redis.start()
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(f"redis://{redis.where}/?prefix=k", run.twin, run.data, "row_wise", "adagrad")


def test_a_server_that_is_restarted_within_the_limit_is_not_noticed(server):
    redis = server(*DURABLE)
    run = twins.Run(f"redis://{redis.where}/?prefix=r&timeout=5s&retry_limit=4")
    run.train(6)
    redis.kill()
    back = threading.Timer(0.5, redis.start)
    back.start()
    run.train(len(run.data))
    back.join()
    tde.save(run.ours.model)
    twins.compare_rows(f"redis://{redis.where}/?prefix=r", run.twin, run.data, "row_wise", "adagrad")


def test_a_server_that_hangs_raises_after_the_timeout_and_is_used_again_when_it_answers(server):
    redis = server()
    run = twins.Run(f"redis://{redis.where}/?prefix=h&{QUICK}")
    run.train(6)
    redis.signal(signal.SIGSTOP)
    raises_in_time(run, ConnectionError, 30)
    redis.signal(signal.SIGCONT)
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(f"redis://{redis.where}/?prefix=h", run.twin, run.data, "row_wise", "adagrad")


def test_a_full_server_raises_and_loses_nothing(server):
    redis = server("--maxmemory-policy", "noeviction")
    run = twins.Run(f"redis://{redis.where}/?prefix=m&{QUICK}")
    run.train(6)
    redis.cli("config", "set", "maxmemory", "1mb")
    raises_in_time(run, RuntimeError, 30, match="is full")
    redis.cli("config", "set", "maxmemory", "0")
    run.train(len(run.data))
    tde.save(run.ours.model)
    twins.compare_rows(f"redis://{redis.where}/?prefix=m", run.twin, run.data, "row_wise", "adagrad")


@pytest.mark.parametrize("layout", ["compatible", "packed"])
@pytest.mark.parametrize(("damage", "text"), [("short", "should have .* bytes but has: 3"), ("list", "list")])
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(server, layout, damage, text):
    redis = server()
    run = twins.Run(f"redis://{redis.where}/?prefix=w&layout={layout}&{QUICK}", num_prefetch=0)
    name = f"w_table_emb.item_gid_{scattered(np.array([1]))[0]}_cid_0" + "_osid_1" * (layout == "compatible")
    other = name.replace("_osid_1", "_osid_0")
    if layout == "compatible":
        redis.cli("set", other, "x" * 32)
    redis.cli(*(("set", name, "abc") if damage == "short" else ("rpush", name, "abc")))
    message = raises_in_time(run, RuntimeError, 30, match=text)
    assert name in message
    redis.cli("del", name, other)
    run.train(len(run.data))


def test_a_server_that_is_not_there_raises_at_wrap(server):
    ours = trainer(64)
    begin = time.monotonic()
    with pytest.raises(ConnectionError):
        tde.wrap(
            f"redis://user:secret-word@127.0.0.1:{free_port()}/?{QUICK}",
            [],
            ours.model,
            {"emb": ours.configs},
        )
    assert time.monotonic() - begin < 10
    assert not hasattr(ours.model, "_id_transformer_group")
