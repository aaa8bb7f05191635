"""Real ranks for tests: processes that join a gloo group of any size up to four, again and again.

    results = ranks.run(2, jobs.train, steps=3)      # [what rank 0 returned, what rank 1 returned]

Starting a process that has TorchRec takes seconds, so the same four serve all tests. A job that takes too
long, or a process that dies, ends all of them; the next job gets new ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

MOST = 4
START_SECONDS = 150.0


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import logging
    import warnings

    logging.disable(logging.WARNING)  # TorchRec's planner is talkative
    warnings.filterwarnings("ignore", module="torchrec")
    warnings.filterwarnings("ignore", module="torch")
    import torch
    import torch.distributed as dist
    from torchrec.distributed import collective_utils

    import dynamicemb.planner
    import dynamicemb.shard  # noqa: F401
    import embstore

    # TorchRec settles this once a process, by a broadcast that ranks which join later would wait for.
    collective_utils._INITIALIZED = True
    torch.set_num_threads(1)
    embstore.set_num_threads(1)
    pipe.send("ready")
    while True:
        job = pipe.recv()
        if job is None:
            return
        world, store, timeout, group_timeout, function, arguments, keywords = job
        faulthandler.dump_traceback_later(0.8 * timeout)  # where it hangs
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=group_timeout),
            )
            dist.barrier()  # a rank that raises at once leaves before the last one has connected
            os.environ["LOCAL_WORLD_SIZE"] = str(world)
            torch.manual_seed(1234)
            answer = (True, function(*arguments, **keywords))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
        # plain pickle: tensors by value, not as handles of shared memory
        pipe.send_bytes(pickle.dumps(answer))


class RankFailed(AssertionError):
    """A job raised; `errors` has (type, message, trace) or None for every rank."""

    def __init__(self, errors: list[tuple[str, str, str] | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {r}: {e[2]}" for r, e in enumerate(errors) if e))


class _Pool:
    def __init__(self) -> None:
        # TorchRec is imported once, by the process that the ranks are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dynamicemb.shard", "dynamicemb.planner"])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(START_SECONDS) or pipe.recv() != "ready":
                self.kill()
                raise TimeoutError("a rank did not start")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pool: _Pool | None = None


def _end() -> None:
    global _pool
    if _pool is not None:
        _pool.kill()
        _pool = None


atexit.register(_end)


def run(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 90.0,
    group_timeout: float | None = None,
    **keywords: Any,
) -> list[Any]:
    """What the function returned on each rank. RankFailed when one raised; TimeoutError when one hangs.

    group_timeout  of the process group; by default that of the job
    """
    global _pool
    if _pool is None:
        _pool = _Pool()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        job = (world, store, timeout, group_timeout or timeout, function, arguments, keywords)
        pipes = _pool.pipes[:world]
        for pipe in pipes:
            pipe.send(job)
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    failures = "".join(value[2] for ok, value in answers if not ok)
                    raise TimeoutError(f"rank {rank} did not answer in {timeout} s. {failures}")
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (TimeoutError, EOFError):
                _end()
                raise
    if not all(ok for ok, _ in answers):
        raise RankFailed([None if ok else value for ok, value in answers])
    return [value for _, value in answers]


def errors(
    world: int, function: Callable[..., Any], *arguments: Any, **keywords: Any
) -> list[tuple[str, str, str]]:
    """The errors of a job that has to fail on every rank."""
    try:
        run(world, function, *arguments, **keywords)
    except RankFailed as failed:
        missing = [rank for rank, error in enumerate(failed.errors) if error is None]
        assert not missing, f"ranks {missing} did not raise: {failed}"
        return failed.errors  # type: ignore[return-value]
    raise AssertionError("the job should have raised on every rank")
