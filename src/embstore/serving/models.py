"""A trained torch model as a serving model: readers in the place of its tables.

    served = embstore.serving.serving_model(model, "/data/log")
    served(batch)                                  # what model.eval() gives, from the newest state

    model  ─ DistributedModelParallel ─ net ┬ sparse  (tables)        served  ─ net ┬ sparse  (a reader)
                                            └ dense                                 └ dense   (a copy)

A module that has tables says what stands for it, by a method

    to_serving(tables: ServedTables) -> nn.Module

so modules of other packages take part too.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from typing import Any

from embstore.extras import missing

try:
    import torch
except ImportError as error:
    raise missing("a serving model", "torch", error) from error

from torch import nn

from embstore.nn.row_module import RowModule
from embstore.serving.reader import Reader, State


class Source:
    """The reader of a serving model. A forward pass of the model answers from one state, which is chosen when
    it begins."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._pinned = threading.local()

    @property
    def state(self) -> State:
        state: State | None = getattr(self._pinned, "state", None)
        return self.reader.state if state is None else state

    def pin(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._pinned.state = self.reader.state

    def unpin(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._pinned.state = None

    def __deepcopy__(self, memo: object) -> Source:
        return self


class ServedTables:
    """The tables of one module in the source."""

    def __init__(self, source: Source, path: str, collection: str | None) -> None:
        self.source, self.path, self._collection = source, path, collection

    def name_of(self, table: str, collection: str | None = None) -> str:
        """How the reader calls a table. It is in the collection that the user names; else in that of the
        module's name (`collection`) or path; else it is the only table of its name."""
        names = self.source.state.names
        if self._collection is not None:
            candidates = [f"{self._collection}/{table}"]
        else:
            places = [collection, self.path, self.path.removeprefix("model.")]
            candidates = [*(f"{place}/{table}" for place in places if place), table]
        for name in candidates:
            if name in names:
                return name
        raise KeyError(
            f"table {table!r} of the module {self.path!r} is not in {self.source.reader.path}, which has: "
            f"{', '.join(sorted(n for n in names if '/' in n))}; collections={{{self.path!r}: ...}} names "
            "its collection"
        )


def serving_model(
    model: nn.Module,
    source: str | os.PathLike[str] | Reader,
    *,
    collections: Mapping[str, str] | None = None,
    **options: Any,
) -> nn.Module:
    """A copy of a model for the CPU, in eval mode, whose tables are read from a dump or a log.

    model        has native modules, `dynamicemb` collections or `one_embedding` modules, also inside of
                 DistributedModelParallel or DistributedDataParallel, which are left out
    source       the folder (or URL) of a dump or an increment log, or a `Reader`
    collections  {path of a module: collection of the source}, where tables of one name are ambiguous. The
                 path of the model itself is "model"
    options      for the `Reader`, such as dtype="int8"

    The copy needs no process group. It has the outputs of `model.eval()`; with a log it follows once
    `served.source.reader.start()` is called. Raises ValueError when the model has no tables, KeyError when
    the source lacks one of them.

        served = embstore.serving.serving_model(model, "/data/log")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model should be a torch module but is: {type(model).__name__}")
    reader = source if isinstance(source, Reader) else Reader(source, **options)
    if reader is source and options:
        raise TypeError(f"options should come without a Reader but are: {', '.join(options)}")
    named, view = dict(collections or {}), Source(reader)
    memo: dict[int, Any] = {}  # of deepcopy: what stands for a module
    replaced: set[str] = set()

    def visit(module: nn.Module, path: str) -> None:
        inner = _unwrapped(module)
        if id(inner) not in memo:
            to_serving: Any = getattr(inner, "to_serving", None)
            if to_serving is not None:
                memo[id(inner)] = to_serving(ServedTables(view, path, named.get(path)))
                replaced.add(path)
            elif isinstance(inner, RowModule):
                kind = type(inner).__name__
                raise TypeError(f"module {path!r} should have a method to_serving but is: {kind}")
            else:
                for name, child in inner.named_children():
                    visit(child, f"{path}.{name}")
        if inner is not module:
            memo[id(module)] = copy.deepcopy(inner, memo)

    visit(model, "model")
    if not replaced:
        raise ValueError("model should have tables of embstore but has none")
    unknown = sorted(set(named) - replaced)
    if unknown:
        raise ValueError(f"collections should name modules among {sorted(replaced)} but has: {unknown}")
    served: nn.Module = copy.deepcopy(model, memo)
    served.source = view  # type: ignore[assignment]
    served.register_forward_pre_hook(view.pin)
    served.register_forward_hook(view.unpin, always_call=True)
    return served.cpu().eval().requires_grad_(False)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers for several ranks; TorchRec's is known by its attribute."""
    wrappers: tuple[type, ...] = ()
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.nn.parallel import DistributedDataParallel

        wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    inner: Any = module
    while isinstance(inner, wrappers) or hasattr(inner, "_dmp_wrapped_module"):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner
