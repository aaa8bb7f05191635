"""`wrap` and `save`: a loader whose batches hold slots instead of ids.

loader = tde.wrap("redis://127.0.0.1:6379/?prefix=model", loader, model, {"emb": configs})
for label, kjt in loader:
    ...                      # the rows of these ids are in the tables of the model
tde.save(model)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchrec.distributed.model_parallel import DistributedModelParallel

from .assignment import DataInfo, mapped_tensors
from .containers import replaced
from .id_transformer_group import IDTransformerGroup
from .in_flight import Feed, InFlight
from .jagged_ids import ids_of, with_slots
from .prefetch import Pipeline, Ready
from .ps import Url
from .windows import BATCH, END, FAILED, STOPPED

__all__ = ["DataLoader", "DataLoaderIter", "save", "wrap"]

_GROUP = "_id_transformer_group"


def wrap(
    url: Url,
    dataloader: Iterable[Any],
    module: DistributedModelParallel,
    configs_dict: Mapping[str, Sequence[Any]],
    *,
    data_info: DataInfo | None = None,
    eviction_config: Mapping[str, Any] | None = None,
    transform_config: Mapping[str, Any] | None = None,
    ps_config: Mapping[str, Any] | None = None,
    parallel: bool = True,
    num_prefetch: int = 0,
    return_module: bool = False,
) -> Any:
    """Makes the tables of `module` a window on the store at `url`. All ranks call it together.

    The rows of a batch stay where they are until it was trained and the next one was asked for; batches may
    be taken ahead as far as the tables have room for them.

    Args:
        url: where rows are kept: `redis://…`, `memory://NAME`, `ssd:///path` or the type of a plug-in; or a
            function of (path, table name) that returns one.
        dataloader: any iterable of batches: a KeyedJaggedTensor, or tuples, lists, dicts, dataclasses and
            plain objects that hold some. Their ids become slots, in a copy of the same type; everything else
            is handed through.
        module: a DistributedModelParallel that is not wrapped yet.
        configs_dict: path of a collection inside the model to the configs of its tables.
        data_info: which KeyedJaggedTensor of a batch belongs to which path: {place: path}, where a place is
            an index, a key, the name of a field, or a tuple of these that leads inwards. By default each
            goes to the first collection with one of its features that no other has taken.
        eviction_config: {"type": "mixed_lru_lfu", "min_used_freq_power": 5}.
        transform_config: {"type": "naive"} or {"type": "cacheline"}, which mean the same here.
        ps_config: {"chunk_size": numbers moved by one call to the store, "seed": of new rows}.
        parallel: push and pull the tables side by side.
        num_prefetch: how many batches may be ready ahead, prepared by a thread. 0: prepared when asked for.
        return_module: return (loader, module) instead of the loader.

    Returns:
        A `DataLoader` whose batches hold slots in place of ids; every iteration is an epoch.

    Raises:
        ValueError: an argument is out of range, a path is no collection of the model, or it is wrapped
            already.
        ConnectionError: the store cannot be reached; also while batches are taken.
        RuntimeError: while batches are taken, those in flight need more rows than a table has.

    Examples:
        >>> import torch, torchrec_dynamic_embedding as tde
        >>> loader = tde.wrap("memory://ads", batches, model, {"emb": configs}, num_prefetch=2)
        >>> for label, kjt in loader:
        ...     loss = torch.nn.functional.mse_loss(model(kjt)[:, 0], label)
        ...     loss.backward()
        >>> tde.save(model)
    """
    if isinstance(num_prefetch, bool) or not isinstance(num_prefetch, int) or num_prefetch < 0:
        raise ValueError(f"num_prefetch should be an integer of at least 0 but is: {num_prefetch!r}")
    if not configs_dict:
        raise ValueError("configs_dict should name at least one collection but is empty")
    for path in (data_info or {}).values():
        if path not in configs_dict:
            raise ValueError(
                f"data_info should have paths of configs_dict ({list(configs_dict)}) but has: {path!r}"
            )
    if getattr(module, _GROUP, None) is not None:
        raise ValueError(
            "module should not be wrapped yet, but it is; DataLoader takes another loader for it"
        )
    group = IDTransformerGroup(
        url,
        module,
        configs_dict,
        eviction_config=eviction_config,
        transform_config=transform_config,
        ps_config=ps_config,
        parallel=parallel,
    )
    setattr(module, _GROUP, group)
    loader = DataLoader(group, dataloader, data_info=data_info, num_prefetch=num_prefetch)
    return (loader, module) if return_module else loader


def save(module: DistributedModelParallel) -> None:
    """Pushes every row that changed since the last save. All ranks call it together, between two steps.

    There is no load: a model that is wrapped with the same url finds its rows there.

    Args:
        module: a model that `wrap` has wrapped.

    Raises:
        ValueError: it is not wrapped.
        ConnectionError: the store cannot be reached; what was not pushed stays to be pushed.

    Examples:
        >>> import torchrec_dynamic_embedding as tde
        >>> loader = tde.wrap("memory://ads", batches, model, {"emb": configs})
        >>> for label, kjt in loader:
        ...     model(kjt).sum().backward()
        >>> tde.save(model)
    """
    group = getattr(module, _GROUP, None)
    if group is None:
        raise ValueError(f"module should be wrapped by tde.wrap but is a plain: {type(module).__name__}")
    if not isinstance(group, IDTransformerGroup):
        raise ValueError(f"module.{_GROUP} should be an IDTransformerGroup but is: {type(group).__name__}")
    group.save()


class DataLoader:
    """Iterates over `dataloader`, every batch once and in order, with slots in place of ids.

    A second one over the same group serves another data set, such as the one for validation.
    """

    def __init__(
        self,
        group: IDTransformerGroup,
        dataloader: Iterable[Any],
        *,
        data_info: DataInfo | None = None,
        num_prefetch: int = 0,
    ) -> None:
        for path in (data_info or {}).values():
            if path not in group:
                raise ValueError(
                    f"data_info should have paths of the group ({list(group.collections)}) but has: {path!r}"
                )
        self._group = group
        self._dataloader = dataloader
        self._data_info = dict(data_info) if data_info is not None else None
        self._num_prefetch = num_prefetch
        self._current: Callable[[], DataLoaderIter | None] = lambda: None  # a weak reference
        self._last: Feed | None = None

    def __len__(self) -> int:
        return len(self._dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> DataLoaderIter:
        if self._last is not None:
            if (running := self._current()) is not None:
                running.stop()
            self._group.windows.in_flight.forget_dropped(self._last)
        iterator = DataLoaderIter(self._group, self._dataloader, self._data_info, self._num_prefetch)
        self._current, self._last = weakref.ref(iterator), iterator.feed
        return iterator


class DataLoaderIter:
    """One epoch. `close` ends it early; so does dropping it.

    The rows of a batch stay in the tables until it was trained: see docs/torchrec_dynamic_embedding.md.
    """

    def __init__(
        self,
        group: IDTransformerGroup,
        dataloader: Iterable[Any],
        data_info: DataInfo | None,
        num_prefetch: int,
    ) -> None:
        self._group = group
        self._flight = group.windows.in_flight
        self.feed = Feed()
        self._ended = False
        if group.windows.peers.world > 1 and group.pipeline is not None and group.pipeline.is_running():
            raise RuntimeError(
                "on several ranks one iterator with num_prefetch should be at its end, or closed, "
                "before another begins"
            )
        source = _Source(group, dataloader, data_info, self.feed)
        group.pipeline = pipeline = (
            Pipeline(source.prepare, num_prefetch, self._flight.remove) if num_prefetch else None
        )
        self._prepare: Callable[[], Ready] = (
            pipeline.next if pipeline else lambda: source.prepare(lambda: False, threading.get_ident)
        )
        # Runs when the iterator is closed, collected, or still there as the interpreter ends.
        self._stop = weakref.finalize(self, _end, pipeline, self._flight, self.feed)

    def __iter__(self) -> DataLoaderIter:
        return self

    def __next__(self) -> Any:
        self._flight.asked_for_next(self.feed)
        if self._ended:
            raise StopIteration
        try:
            self._group.check_train_pipeline()
            ready = self._prepare()
            if ready.error is not None:
                raise ready.error
        except BaseException:
            self.stop()
            raise
        self._flight.hand_out(ready.time, ready.values, ready.sizes)
        return ready.batch

    def stop(self) -> None:
        """Ends the epoch. What was handed out can still be trained."""
        self._ended = True
        self._stop()

    def close(self) -> None:
        """Ends the epoch; what was handed out counts as trained."""
        self.stop()
        self._flight.forget(self.feed)


def _end(pipeline: Pipeline | None, flight: InFlight, feed: Feed) -> None:
    if pipeline is not None:
        pipeline.stop()
    flight.end(feed)


class _Source:
    """Takes batches from the user's loader and prepares them."""

    def __init__(
        self,
        group: IDTransformerGroup,
        dataloader: Iterable[Any],
        data_info: DataInfo | None,
        feed: Feed,
    ) -> None:
        self._group = group
        self._dataloader = dataloader
        self._batches: Iterator[Any] | None = None
        self._data_info = data_info
        self._feed = feed

    def prepare(self, stopped: Callable[[], bool], waiting: Callable[[], int | None]) -> Ready:
        """The next batch. What goes wrong reaches the other ranks, so nothing raises before they know."""
        kind, error, batch, mapped, ids = BATCH, None, None, [], None
        if stopped():
            kind = STOPPED
        else:
            try:
                if self._batches is None:
                    self._batches = iter(self._dataloader)
                batch = next(self._batches)
                mapped = mapped_tensors(self._group, batch, self._data_info)
                ids = ids_of([m.part for m in mapped], len(self._group.windows.tables))
            except StopIteration:
                kind = END
            except Exception as failure:
                kind, error = FAILED, failure
        prepared = self._group.windows.prepare(
            ids, kind=kind, error=error, feed=self._feed, stopped=stopped, waiting=waiting
        )
        if prepared is None:
            return Ready(error=StopIteration())
        time, slots = prepared
        new = with_slots([m.part for m in mapped], slots)
        places = {steps: kjt for m, kjt in zip(mapped, new) for steps in m.places}
        sizes = {path: kjt.values().numel() for m, kjt in zip(mapped, new) for path in m.paths}
        return Ready(time, replaced(batch, places), [kjt.values() for kjt in new], sizes)
