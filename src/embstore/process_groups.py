"""Process groups that this package makes for itself, and that end before the interpreter does.

A thread of gloo lets go of the tensors of a collective a moment after the caller went on, and takes Python's
lock to do so. If the interpreter is ending by then, that thread ends the process with an abort. A group that
is gone has no threads, so groups are ended at exit, while Python still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()


class GlooGroup:
    """A gloo group of these ranks, or of all; made by all of them together.

    Its collectives never meet those of the program, nor those of another group.
    """

    group: Any

    def __init__(self, ranks: list[int] | None = None) -> None:
        import torch.distributed as dist

        # Of some ranks only those make it, so the others are not waited for.
        self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
        _groups.add(self)

    def end(self) -> None:
        import torch.distributed as dist

        group, self.group = self.group, None
        # Whoever ended the default group ended this one too, but for its threads, which go with `group`.
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # of an earlier default group
                dist.destroy_process_group(group)


def _end_all() -> None:
    for group in list(_groups):
        group.end()


atexit.register(_end_all)
