"""gloo groups of our own, with the timeout of the group they accompany; they end before the interpreter does.

A thread of gloo releases the tensors of a collective shortly after the caller has moved on, and needs the GIL
for that. If the interpreter is shutting down by then, that thread aborts the process. So our groups are
destroyed at exit, while Python still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

STORE_SECONDS = 5.0  # for the rendezvous store to answer

_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()


def timeout_of(group: Any = None) -> timedelta:
    """How long collectives of a process group (None: the default one) wait for other ranks."""
    import torch
    import torch.distributed as dist

    base: Any = dist.group.WORLD if group is None else group
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: timedelta = base._get_backend(torch.device(device)).options._timeout
            return timeout
    return dist.constants.default_pg_timeout


class GlooGroup:
    """gloo connections between the ranks of `base` (None: the default group); all of them make it together.

    Its collectives cannot mix with those of the program or of another group. `new_group` would name it by how
    many groups a rank has: ranks with different subgroups would wait for each other.
    """

    group: Any

    _numbers: dict[tuple[str, str], tuple[Any, int]] = {}

    def __init__(self, base: Any = None, purpose: str = "") -> None:
        import torch.distributed as dist

        base = dist.group.WORLD if base is None else base
        key = (base.group_name, purpose)
        # A group of an earlier init_process_group may have had the same name.
        before, number = self._numbers.get(key, (None, 0))
        number = number + 1 if before is base else 0
        self.name = f"{base.group_name}/{purpose}/{number}"
        store, timeout = group_store(self.name), timeout_of(base)
        self.group = within(
            timeout.total_seconds() + STORE_SECONDS,
            lambda: dist.ProcessGroupGloo(store, dist.get_rank(base), dist.get_world_size(base), timeout),
        )
        self._numbers[key] = (base, number)
        _groups.add(self)

    def end(self) -> None:
        self.group = None


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs work that talks to the rendezvous store. Raises RuntimeError when it takes longer: a client of the
    store has no timeout of its own, and waits for minutes when the network is gone."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="embstore-rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError(f"the rendezvous store does not answer within {seconds:g} s")
    if errors:
        raise errors.pop()
    return results.pop()


def group_store(name: str) -> Any:
    """A part of the rendezvous store of the default group."""
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"embstore/{name}", c10d._get_default_store())


def _end_all() -> None:
    for group in list(_groups):
        group.end()


atexit.register(_end_all)
