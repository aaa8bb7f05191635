"""torch modules over tables.

    embedding = Embedding(dim=8, optimizer=Adam(lr=0.01))
    loss = model(embedding(ids)).sum()
    loss.backward()                  # the rows have moved: no optimizer.step() is needed

Training inserts missing ids; `eval()` reads 0.0 for them and changes nothing. A full table (max_capacity)
gives its rows to the ids that are frequent lately; all others read and train one shared row. Rows live in
host memory: ids may be on any device, and the vectors come back there. With `device_rows` the rows in use
live on the device of the module (see embstore.nn.device_tier). With `process_group` (or `sharded=True`) they
are spread over ranks (see embstore.nn.sharded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from embstore.extras import missing

try:
    import torch
except ImportError as error:
    raise missing("a module of embstore", "torch", error) from error

from embstore.nn.bags import bag_inputs
from embstore.nn.batch import Batch, Request, as_key_tensor
from embstore.nn.features import Asked, present
from embstore.nn.memory_budget import MemoryBudget, split_equally
from embstore.nn.served import (
    ServedEmbedding,
    ServedEmbeddingBag,
    ServedEmbeddingBagCollection,
    ServedEmbeddingCollection,
)
from embstore.nn.table_module import TableModule
from embstore.options import (
    DEFAULT_MAX_CAPACITY,
    Admission,
    ScoreStrategy,
    TableKeywords,
    TableOptions,
)
from embstore.table import Table

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from embstore.serving.models import ServedTables


class ModuleKeywords(TypedDict, total=False):
    """What all modules take, see `TableModule`."""

    update_in_backward: bool
    max_norm: float | None
    device_rows: int
    process_group: torch.distributed.ProcessGroup | None
    sharded: bool


class CollectionKeywords(ModuleKeywords, total=False):
    """What collections take."""

    memory_budget: int | None


class EmbeddingKeywords(TableKeywords, ModuleKeywords, total=False):
    """What `Embedding` and `EmbeddingBag` take, beside the dim."""

    name: str
    table: Table | None


def _with_defaults(options: TableOptions, device_rows: int, *, bounded: bool) -> TableOptions:
    """A table that may have to evict keeps the rows of ids that are frequent lately and has a shared row for
    the others, unless its options say something else. Rows begin with their initial values: where ids come
    and go, copies of the shared row learn more slowly (docs/sizing.md)."""
    if not bounded or device_rows or options.says_what_goes:
        return options
    return replace(
        options,
        score_strategy=ScoreStrategy.AGED_LFU,
        admission=Admission.FREQUENCY,
        shared_rows=1,
        start_from_shared=options._says_start and options.start_from_shared,
    ).within_bytes(options)


def _new_table(options: TableOptions, device_rows: int) -> Table:
    """A table of a module. Without a seed it gets one from torch's generator, so that modules start
    differently and torch.manual_seed governs them."""
    bounded = options.max_capacity < DEFAULT_MAX_CAPACITY
    options = _with_defaults(options, device_rows, bounded=bounded)
    if options.seed is None:
        options = replace(options, seed=int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64)))
    return Table(options)


class _SingleTable(TableModule):
    def __init__(
        self,
        dim: int | None = None,
        *,
        name: str = "embedding",
        table: Table | None = None,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
        sharded: bool = False,
        **options: Unpack[TableKeywords],
    ) -> None:
        def make() -> list[Table]:
            if table is None:
                if dim is None:
                    raise ValueError("dim should be given unless a table is")
                return [_new_table(TableOptions(name=name, dim=dim, **options), device_rows)]
            if dim is not None or options:
                raise ValueError("table should come without dim and table options")
            return [table]

        super().__init__(
            make,
            update_in_backward=update_in_backward,
            max_norm=max_norm,
            device_rows=device_rows,
            process_group=process_group,
            sharded=sharded,
        )

    def _run_one(self, ask: Callable[[], Asked]) -> torch.Tensor:
        (out,) = self._run(lambda: {self.table.name: ask()}).values()
        return out

    @property
    def table(self) -> Table:
        (table,) = self._tables.values()
        return table


class Embedding(_SingleTable):
    """Vectors of ids: the output has the shape of the ids with `dim` behind it.

    Args:
        dim: components of a vector.
        name: of the table.
        table: a `Table` that exists already; then without `dim` and options.
        update_in_backward: False keeps gradients until `step`.
        max_norm: as clip_grad_norm_ over the rows of this module.
        device_rows: above 0, this many rows are kept on the device of the module.
        process_group: spreads the rows over the ranks of this group, which all call forward and backward
            together; gradients are averaged over the ranks.
        sharded: the same over the default group.
        **options: the fields of `TableOptions`, such as optimizer and max_capacity.

    Raises:
        ValueError: an option is out of range, or neither `dim` nor `table` is given.
        TypeError: ids are no integers (in forward).

    Examples:
        >>> import embstore, torch
        >>> embedding = embstore.Embedding(dim=4, optimizer=embstore.Adagrad(lr=0.1), max_capacity=1_000_000)
        >>> vectors = embedding(torch.tensor([[7, -1], [7, 2**62]]))
        >>> vectors.shape, len(embedding.table)
        (torch.Size([2, 2, 4]), 3)
        >>> vectors.sum().backward()  # the three rows have moved
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._run_one(lambda: Asked(Request(self.table, as_key_tensor(ids))))
        return out.view(*ids.shape, self.table.dim).to(ids.device)

    def to_serving(self, tables: ServedTables) -> ServedEmbedding:
        return ServedEmbedding(self._features, self._dtypes(), tables)


class EmbeddingBag(_SingleTable):
    """Sums or means of the vectors of bags of ids, as `torch.nn.EmbeddingBag`.

    Args:
        dim: components of a vector.
        mode: "sum" or "mean".
        include_last_offset: offsets end with the number of ids.
        **keywords: what `Embedding` takes.

    Raises:
        ValueError: `mode` is another, or an option is out of range.
        TypeError: ids are no integers (in forward).

    Examples:
        >>> import embstore, torch
        >>> bag = embstore.EmbeddingBag(dim=4, mode="mean")
        >>> bag(torch.tensor([7, -1, 12]), offsets=torch.tensor([0, 2])).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        mode: str = "sum",
        include_last_offset: bool = False,
        **keywords: Unpack[EmbeddingKeywords],
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode should be 'sum' or 'mean' but is: {mode!r}")
        super().__init__(dim, **keywords)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids (n) with offsets (bags), or ids (bags, length) without."""

        def ask() -> Asked:
            return ask_bags(
                self.table, ids, offsets, per_sample_weights, self.mode, include_last=self.include_last_offset
            )

        return self._run_one(ask).to(ids.device)

    def to_serving(self, tables: ServedTables) -> ServedEmbeddingBag:
        return ServedEmbeddingBag(
            self._features,
            self._dtypes(),
            tables,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
        )


def ask_bags(
    table: Table,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    mode: str,
    *,
    include_last: bool,
) -> Asked:
    """The request of bags given as in `torch.nn.EmbeddingBag`."""
    keys, starts, values, pooling = bag_inputs(ids, offsets, weights, mode, include_last=include_last)
    return Asked(Request(table, keys, pooling, starts, values), weights)


class TableCollection(TableModule):
    """Base of collections: tables, and the features that look them up. Tables may share features,
    and a table may serve several.

    memory_budget  bytes that all tables need together at most; see embstore.nn.memory_budget
    """

    def __init__(
        self,
        tables: Sequence[TableOptions | Table],
        features: Mapping[str, str] | None = None,
        *,
        update_in_backward: bool = True,
        max_norm: float | None = None,
        device_rows: int = 0,
        process_group: torch.distributed.ProcessGroup | None = None,
        sharded: bool = False,
        memory_budget: int | None = None,
    ) -> None:
        most: dict[str, int] = {}

        def make() -> list[Table]:
            if memory_budget is None:
                return [t if isinstance(t, Table) else _new_table(t, device_rows) for t in tables]
            if device_rows or not all(isinstance(t, TableOptions) for t in tables):
                raise ValueError(
                    "memory_budget should come with TableOptions for each table, without device_rows"
                )
            wanted = [_with_defaults(t, 0, bounded=True) for t in tables if isinstance(t, TableOptions)]
            most.update({t.name: t.max_capacity for t in wanted})
            return [_new_table(t, 0) for t in split_equally(wanted, memory_budget)]

        super().__init__(
            make,
            features,
            update_in_backward=update_in_backward,
            max_norm=max_norm,
            device_rows=device_rows,
            process_group=process_group,
            sharded=sharded,
        )
        self.budget = None if memory_budget is None else MemoryBudget(self._tables, memory_budget, most)

    def _batch_of(self, requests: Sequence[Request], dtype: torch.dtype | None = None) -> Batch:
        if self.budget is not None and self.trains:
            self.budget.before_batch()
        return super()._batch_of(requests, dtype)

    def set_extra_state(self, state: Any) -> None:
        if self.budget is not None:
            self.budget.make_room({name: len(arrays["keys"]) for name, arrays in state.items()})
        super().set_extra_state(state)

    @property
    def features(self) -> Mapping[str, str]:
        """The name of the table that each feature looks up."""
        return self._features


class EmbeddingCollection(TableCollection):
    """Vectors of the ids of several features in one call.

    Args:
        tables: `TableOptions`, or tables that exist already.
        features: the table that each feature looks up; None: a feature of the same name for each table.
        update_in_backward: as in `Embedding`.
        max_norm: as in `Embedding`.
        device_rows: as in `Embedding`.
        process_group: as in `Embedding`.
        sharded: as in `Embedding`.
        memory_budget: bytes that all tables share; their limits move to where another row brings most hits.

    Raises:
        ValueError: two tables have one name, or a feature names no table.

    Examples:
        >>> import embstore, torch
        >>> tables = [embstore.TableOptions(name="user", dim=4), embstore.TableOptions(name="item", dim=8)]
        >>> collection = embstore.EmbeddingCollection(tables, {"user": "user", "clicked": "item"})
        >>> vectors = collection({"user": torch.tensor([1]), "clicked": torch.tensor([5, 6])})
        >>> vectors["clicked"].shape
        torch.Size([2, 8])
    """

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def ask() -> dict[str, Asked]:
            return {
                name: Asked(Request(self._table_of(name), as_key_tensor(inputs[name], name)))
                for name in present(self._features, inputs)
            }

        return {
            name: out.view(*inputs[name].shape, out.shape[1]).to(inputs[name].device)
            for name, out in self._run(ask).items()
        }

    def to_serving(self, tables: ServedTables) -> ServedEmbeddingCollection:
        return ServedEmbeddingCollection(self._features, self._dtypes(), tables)


class EmbeddingBagCollection(TableCollection):
    """Pooled vectors of several features in one call.

    Args:
        tables: `TableOptions`, or tables that exist already.
        features: the table that each feature looks up; None: a feature of the same name for each table.
        mode: "sum" or "mean".
        **keywords: update_in_backward, max_norm, device_rows, process_group and sharded, as in `Embedding`.

    Raises:
        ValueError: `mode` is another, two tables have one name, or a feature names no table.

    Examples:
        >>> import embstore, torch
        >>> collection = embstore.EmbeddingBagCollection([embstore.TableOptions(name="user", dim=4)])
        >>> collection({"user": (torch.tensor([1, 2, 3]), torch.tensor([0, 2]))})["user"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        tables: Sequence[TableOptions | Table],
        features: Mapping[str, str] | None = None,
        *,
        mode: str = "sum",
        **keywords: Unpack[CollectionKeywords],
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode should be 'sum' or 'mean' but is: {mode!r}")
        super().__init__(tables, features, **keywords)
        self.mode = mode

    def forward(self, inputs: Mapping[str, Sequence[torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        def ask() -> dict[str, Asked]:
            asked = {}
            for name in present(self._features, inputs):
                ids, offsets, weights = (*inputs[name], None, None)[:3]
                if ids is None:
                    raise TypeError(f"ids of {name!r} should be a tensor but is: None")
                asked[name] = ask_bags(
                    self._table_of(name), ids, offsets, weights, self.mode, include_last=False
                )
            return asked

        answers = {}
        for name, out in self._run(ask).items():
            ids = inputs[name][0]
            assert ids is not None
            answers[name] = out.to(ids.device)
        return answers

    def to_serving(self, tables: ServedTables) -> ServedEmbeddingBagCollection:
        return ServedEmbeddingBagCollection(self._features, self._dtypes(), tables, mode=self.mode)
