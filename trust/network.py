"""Two hosts and the wire between them: training under torchrun, and rows in Redis.

    python -m trust.network                     all parts
    python -m trust.network --part training

training  torchrun on two hosts trains over the wire. The wire is cut in the middle: all ranks raise in
          bounded time. After it is back, new ranks go on from the last dump to the losses of a run
          without a cut, to the bit.
redis     A store on one host, its server on the other, against a dict: over a wire that delays and loses
          frames, and over one that is cut, when a call has to raise within its limit. Nothing that was
          acknowledged is lost, and a table over that store trains to the bits of a table in memory.

Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from torch.distributed import run as torchrun

from trust import hosts
from trust import training_job as job

ROOT = Path(__file__).parents[1]
GROUP_SECONDS = 10.0
MOST_SECONDS = GROUP_SECONDS + 15  # for all ranks to raise after a cut
RUN_SECONDS = 150
RENDEZVOUS_PORT = 29400
REDIS_PORT = 6379
CALL_SECONDS = 1.0  # the timeout of a call of the store
CUT_AT = 4  # the step; the first dump is after step 2


# ---- training


class Torchrun:
    """torchrun on both hosts, one rank or more on each. Forked: it need not import torch again."""

    def __init__(self, both: hosts.Hosts, folder: Path, ranks_each: int) -> None:
        self._folder, self._world = folder, 2 * ranks_each
        for rank in range(self._world):
            (folder / f"said-{rank}").write_text("")
        self._running = {
            both.fork(which, partial(self._start, which, ranks_each)) for which in hosts.ADDRESSES
        }

    def _start(self, which: str, ranks_each: int) -> None:
        os.setsid()
        log = os.open(self._folder / f"log-{which}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(ROOT)
        os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        arguments = ["--nnodes=2", f"--nproc-per-node={ranks_each}", "--max-restarts=0"]
        arguments += ["--rdzv-backend=c10d", "--rdzv-id=job"]
        arguments += [f"--rdzv-endpoint={hosts.ADDRESSES['a']}:{RENDEZVOUS_PORT}"]
        # torchrun would compare the endpoint with the name of the machine, which both have.
        arguments += [f"--rdzv-conf=is_host={int(which == 'a')}", f"--local-addr={hosts.ADDRESSES[which]}"]
        torchrun.main([*arguments, "-m", "trust.training_job", str(self._folder), str(GROUP_SECONDS)])

    def said(self) -> list[list[tuple[float, str]]]:
        """By rank: (time, what)."""
        found = []
        for rank in range(self._world):
            lines = (self._folder / f"said-{rank}").read_text().splitlines()
            found.append([(float(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines])
        return found

    def wait(self, done: Callable[[list[list[tuple[float, str]]]], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done(self.said()):
            if not self._still_running() or time.monotonic() > deadline:
                logs = "".join(
                    (self._folder / f"log-{which}").read_text()[-1500:] for which in hosts.ADDRESSES
                )
                last = [said[-1:] for said in self.said()]
                raise AssertionError(f"the ranks do not come on: {last}\n{logs}")
            time.sleep(0.05)

    def _still_running(self) -> set[int]:
        self._running -= {program for program in self._running if os.waitpid(program, os.WNOHANG)[0]}
        return self._running

    def stop(self) -> None:
        for program in self._still_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program, signal.SIGKILL)
            os.kill(program, signal.SIGKILL)  # before it had a group of its own
            os.waitpid(program, 0)


def have_ended(said: list[list[tuple[float, str]]]) -> bool:
    return all(lines and lines[-1][1].startswith(("rows ", "error ")) for lines in said)


def results(said: list[list[tuple[float, str]]]) -> tuple[dict[tuple[int, str], str], str]:
    """Losses by (rank, step), and the hash of the rows."""
    errors = [text for lines in said for _, text in lines if text.startswith("error ")]
    assert not errors, errors
    losses = {}
    for rank, lines in enumerate(said):
        for words in (text.split() for _, text in lines if text.startswith("loss ")):
            losses[rank, words[1]] = words[2]
    return losses, said[0][-1][1]


def whole_run(both: hosts.Hosts, folder: Path, ranks_each: int) -> tuple[dict[tuple[int, str], str], str]:
    run = Torchrun(both, folder, ranks_each)
    try:
        run.wait(have_ended, RUN_SECONDS)
        return results(run.said())
    finally:
        run.stop()


def cut_run(both: hosts.Hosts, folder: Path, ranks_each: int) -> tuple[float, list[str]]:
    """Returns how long the slowest rank took to raise, and what they raised."""
    run = Torchrun(both, folder, ranks_each)
    try:
        run.wait(lambda said: any(text == f"step {CUT_AT}" for _, text in said[0]), RUN_SECONDS)
        with both.cut_wire():
            cut = time.time()
            run.wait(have_ended, MOST_SECONDS + 60)
        ends = [lines[-1] for lines in run.said()]
    finally:
        run.stop()
    assert all(text.startswith("error ") for _, text in ends), f"not all ranks raise: {ends}"
    slowest = max(when for when, _ in ends) - cut
    assert slowest < MOST_SECONDS, f"ranks raise {slowest:.1f} s after the cut: {ends}"
    return slowest, [text for _, text in ends]


def training(both: hosts.Hosts, folder: Path, ranks_each: int) -> str:
    for name in ("whole", "cut"):
        (folder / name).mkdir()
    losses, rows = whole_run(both, folder / "whole", ranks_each)
    seconds, errors = cut_run(both, folder / "cut", ranks_each)
    saved = job.newest(folder / "cut", "dump")
    again, rows_again = whole_run(both, folder / "cut", ranks_each)
    assert min(int(step) for _, step in again) == saved * job.STEPS_PER_SAVE
    assert again == {at: losses[at] for at in again}, "losses differ after the cut"
    assert rows == rows_again, "rows differ after the cut"
    kinds = sorted({error.split()[1] for error in errors})
    return f"cut: {', '.join(kinds)} within {seconds:.1f} s; resumed from dump {saved} to the same bits"


# ---- Redis


def store_url(**options: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"redis://{hosts.ADDRESSES['b']}:{REDIS_PORT}/?timeout={CALL_SECONDS}s{more}"


def oracle_rounds(rounds: int) -> int:
    """Puts, erases and reads random rows; returns how many calls raised and were made again."""
    from embstore.stores.redis.store import RedisStore

    rng, rows = np.random.default_rng(1), {}
    raised = 0
    store = RedisStore(store_url(prefix="d", retry_limit=20), table="t", tensor_bytes=[24])
    universe = np.arange(-500, 500)

    def certainly(call: Callable[[], object]) -> object:
        nonlocal raised
        for _ in range(20):
            try:
                return call()
            except ConnectionError:
                raised += 1
        raise AssertionError("20 calls failed one after the other")

    for _ in range(rounds):
        keys = rng.choice(universe, 200, replace=False)
        values = rng.integers(0, 256, (200, 24), np.uint8)
        certainly(lambda: store.put(keys, values, np.ones(200, np.uint64)))  # noqa: B023
        rows |= {int(key): value.tobytes() for key, value in zip(keys, values)}
        gone = rng.choice(universe, 40, replace=False)
        certainly(lambda: store.erase(gone))  # noqa: B023
        for key in gone:
            rows.pop(int(key), None)
        got, _, found = certainly(lambda: store.get(universe))  # type: ignore[misc]
        assert found.tolist() == [int(key) in rows for key in universe]
        for key, row in zip(universe[found], got[found]):
            assert row.tobytes() == rows[int(key)], f"the row of {key} is not what was written"
    assert sorted(k for keys in store.scan_keys() for k in keys.tolist()) == sorted(rows)
    return raised


def trained_rows(below: str | None) -> np.ndarray:
    """The rows of a table that was trained over a store; None: in memory alone."""
    import embstore
    from embstore.stores.urls import tiers

    options = embstore.TableOptions(
        name="t", dim=4, optimizer=embstore.Adagrad(), seed=1, **({"max_capacity": 128} if below else {})
    )
    store = tiers(below, upper_rows=128)(options, 0) if below else None
    rng = np.random.default_rng(3)
    table = embstore.Table(options, store=store)
    for _ in range(8):
        ids = rng.integers(0, 1000, 100)
        table.find_or_insert(ids)
        table.apply_gradients(ids, rng.normal(size=(100, 4)).astype(np.float32))
    rows = table.rows()
    table.close()
    return np.concatenate([rows.values, rows.states], axis=1)[np.argsort(rows.keys)]


def on_a(both: hosts.Hosts, work: Callable[[], object]) -> None:
    """Runs it in a process on host a, whose failure is one."""
    _, status = os.waitpid(both.fork("a", work), 0)
    assert status == 0, "see above"


def redis_over_the_wire(both: hosts.Hosts, folder: Path, rounds: int) -> str:
    command = ["redis-server", "--bind", hosts.ADDRESSES["b"], "--port", str(REDIS_PORT), "--save", ""]
    command += ["--protected-mode", "no", "--dir", str(folder)]
    server = both.start("b", command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    told = folder / "told"

    def bad() -> None:
        begin = time.monotonic()
        raised = oracle_rounds(rounds)
        assert np.array_equal(trained_rows(store_url(prefix="m", retry_limit=20)), trained_rows(None))
        told.write_text(f"{rounds} rounds in {time.monotonic() - begin:.1f} s, {raised} calls repeated")

    def cut() -> None:
        from embstore.stores.redis.store import RedisStore

        store = RedisStore(store_url(prefix="c", retry_limit=2), table="t", tensor_bytes=[8])
        keys, values = np.arange(3000), np.ones((3000, 8), np.uint8)
        store.put(keys, values, np.ones(3000, np.uint64))
        (folder / "written").touch()
        while not (folder / "is-cut").exists():
            time.sleep(0.01)
        for call in (lambda: store.get(keys), lambda: store.put(keys, values, np.ones(3000, np.uint64))):
            begin = time.monotonic()
            try:
                call()
            except ConnectionError:
                seconds = time.monotonic() - begin
                assert seconds < 2 * CALL_SECONDS + 5, f"raises after {seconds:.1f} s"
            else:
                raise AssertionError("a call succeeds over a cut wire")
        (folder / "raised").touch()
        while not (folder / "is-back").exists():
            time.sleep(0.01)
        patient = RedisStore(store_url(prefix="c", retry_limit=20), table="t", tensor_bytes=[8])
        rows, _, found = patient.get(keys)
        assert found.all() and (rows == 1).all(), "rows are lost"
        assert store.get(keys)[2].all(), "the store that raised does not come back"

    try:
        with both.bad_wire(delay_seconds=0.01, loss=0.02):
            on_a(both, bad)
        child = both.fork("a", cut)
        wait_for(folder / "written")
        with both.cut_wire():
            (folder / "is-cut").touch()
            wait_for(folder / "raised")
        (folder / "is-back").touch()
        assert os.waitpid(child, 0)[1] == 0, "see above"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    return f"10 ms and 2 % loss: {told.read_text()}; cut: raises in time, rows are there afterwards"


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.01)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", action="append", choices=("training", "redis"), help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rounds", type=int, default=60, help="of the Redis part")
    options = parser.parse_args(arguments)
    reason = hosts.unavailable()
    if reason:
        print(f"skipped: {reason}")
        return 0
    broken = 0
    for part in options.part or ("training", "redis"):
        with tempfile.TemporaryDirectory() as name, hosts.Hosts() as both:
            try:
                if part == "training":
                    told = training(both, Path(name), options.ranks)
                else:
                    told = redis_over_the_wire(both, Path(name), options.rounds)
            except AssertionError as error:
                broken, told = broken + 1, f"BROKEN: {error}"
        print(f"{part:<10}{told}", flush=True)
    print(f"{broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
