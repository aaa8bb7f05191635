"""Look-ahead: rows of the next batch come up from the store while the current one trains.

for batch in LookAhead(loader, lambda batch: table.prefetch(batch["ids"])):
    train(batch)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

B = TypeVar("B")


class LookAhead(Generic[B]):
    """The batches of a torch DataLoader, or of any iterable, each with its rows in memory when it comes.

    prefetch  is called with a batch, on a thread of its own, and returns what keeps the rows in memory:
              the result of `Table.prefetch`, or a list of such. It is let go when the next batch is asked for
    depth     how many batches are fetched in advance, each on a thread: while one waits for the disk, another
              puts its rows in their places

    An exception of `prefetch` is raised when its batch is due.
    """

    def __init__(self, loader: Iterable[B], prefetch: Callable[[B], Any], depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth should be an integer of at least 1 but is: {depth!r}")
        self.loader, self.prefetch, self.depth = loader, prefetch, depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[B]:
        batches = iter(self.loader)
        coming: deque[tuple[B, Future[Any]]] = deque()
        pool = ThreadPoolExecutor(self.depth, thread_name_prefix="embstore-look-ahead")

        def fill() -> None:
            while len(coming) < self.depth:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                coming.append((batch, pool.submit(self.prefetch, batch)))

        try:
            fill()
            while coming:
                batch, future = coming.popleft()
                held = future.result()
                fill()
                yield batch
                del held
        finally:
            pool.shutdown(cancel_futures=True)
