"""What a table shows of itself: in an editor, in a notebook, as a dataframe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from embstore import display

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from embstore.table import Table


class TableViews:
    """Base of `Table`."""

    @property
    def _table(self) -> Table:
        return cast("Table", self)

    def __contains__(self, key: object) -> bool:
        return bool(self._table.contains([key])[0])

    def __iter__(self) -> Iterator[int]:
        """The keys at this moment, of the table and the store below it, in no order."""
        for rows in self._table.export(with_values=False, with_states=False):
            yield from rows.keys.tolist()

    def __repr__(self) -> str:
        return display.describe(self._table)

    def _repr_html_(self) -> str:
        return display.as_html([self._table])

    def to_arrow(self, *, states: bool = False) -> pyarrow.Table:
        """The rows as an Arrow table, sorted by key: columns key, vector, score, and each optimizer state.

        Args:
            states: with the optimizer states too.

        Returns:
            A pyarrow.Table; its metadata describes the table, so that written as Parquet it can be loaded.

        Raises:
            ImportError: pyarrow is missing (pip install 'embstore[files]').

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.insert_or_assign([7, -1], [[1, 2], [3, 4]])
            >>> table.to_arrow()["vector"].to_pylist()
            [[3.0, 4.0], [1.0, 2.0]]
        """
        from embstore.formats.columns import arrow_of_table

        return arrow_of_table(self._table, states)

    def to_pandas(self, *, states: bool = False) -> pandas.DataFrame:
        """The rows as a DataFrame with the index `key`: columns score, vector_0, vector_1, ...

        Args:
            states: with the optimizer states too, named as in dumps: m_0, ...

        Returns:
            A pandas.DataFrame, sorted by key.

        Raises:
            ImportError: pandas is missing (pip install 'embstore[pandas]').

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.insert_or_assign([7, -1], [[1, 2], [3, 4]])
            >>> table.to_pandas()["vector_1"].to_dict()
            {-1: 4.0, 7: 2.0}
        """
        from embstore.formats.columns import pandas_of_table

        return pandas_of_table(self._table, states)

    def plot(self) -> Any:
        """Histograms of the norms of vectors and of the scores.

        Returns:
            The two matplotlib axes; `axes[0].figure` is the figure.

        Raises:
            ImportError: matplotlib is missing (pip install 'embstore[plot]').

        Examples:
            >>> import embstore
            >>> table = embstore.Table("user", dim=2)
            >>> table.find_or_insert([1, 2, 3]).shape
            (3, 2)
            >>> norms, scores = table.plot()
            >>> norms.figure.savefig("/tmp/user.png")  # doctest: +SKIP
        """
        return display.plot(self._table)
