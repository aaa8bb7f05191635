"""The files of a table: which there are in each layout, and what a row has in each of them.

    v1a       user_keys  user_values  user_scores  user_opt_state_m_keys  user_opt_state_m_values  ...
    v1b       user_keys  user_values ([vector | states])  user_scores
    v2-alpha  user_emb_keys.rank_0.world_size_2  ...  user_opt_values.rank_0.world_size_2
    v2        user_emb_keys.rank_0.world_size_2  ...  user_emb_opt_values.rank_0.world_size_2

We write v1a and v2, and read all four. See docs/formats.md.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embstore.checkpoint.errors import CheckpointError
from embstore.checkpoint.files import file_size, read_json
from embstore.checkpoint.names import STATE_MARK, file_stem
from embstore.checkpoint.spec import CLOCK_STRATEGIES, FILE_STATES, ORIGINAL_TYPES, SCORE_WORDS, TableSpec

WRITTEN = ("v1a", "v2")
MOST_FLOATS = 1 << 20  # of a row in one file; more is a damaged file of keys or of values
ROWWISE_FLOATS = (1, 4, 8)  # that the state of a row-wise optimizer fills where it is behind the vector
_RANKED = re.compile(r"(?P<stem>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<world>\d+)")
_ANY_RANKED = re.compile(r"(?P<stem>.+)_emb_(keys|values|scores)\.rank_\d+\.world_size_\d+")


@dataclass(frozen=True)
class Column:
    """One file of a table to be written: `kind` is keys, values, scores, ages, words, uses or states."""

    file: str
    kind: str
    row_bytes: int
    begin: int = 0  # states: the first float and how many
    width: int = 0
    words: tuple[str, ...] = ()  # words: what the int64s of a score are


def columns_to_write(spec: TableSpec, layout: str, optim: bool, rank: int, world: int) -> list[Column]:
    """The row-wise files of one rank; in v1a all ranks share them."""
    stem = file_stem(spec.name)
    if layout == "v1a":
        columns = [
            Column(f"{stem}_keys", "keys", 8),
            Column(f"{stem}_values", "values", 4 * spec.dim),
            Column(f"{stem}_scores", "scores", 8),
            *([Column(f"{stem}_uses", "uses", 4)] if spec.counts_uses else []),
        ]
        for name, begin, width in spec.file_states() if optim else []:
            state = f"{stem}{STATE_MARK}{name}"
            columns.append(Column(f"{state}_keys", "keys", 8))
            columns.append(Column(f"{state}_values", "states", 4 * width, begin, width))
            if spec.score_strategy not in CLOCK_STRATEGIES:
                columns.append(Column(f"{state}_scores", "scores", 8))
        return columns
    tail = f".rank_{rank}.world_size_{world}"
    columns = [
        Column(f"{stem}_emb_keys{tail}", "keys", 8),
        Column(f"{stem}_emb_values{tail}", "values", 4 * spec.dim),
        _score_column(f"{stem}_emb_scores{tail}", spec),
    ]
    if spec.counts_uses and not spec.score_words:  # what the original package has no word for
        columns.append(Column(f"{stem}_uses{tail}", "uses", 4))
    if optim:
        width = spec.state_width
        columns.append(Column(f"{stem}_emb_opt_values{tail}", "states", 4 * width, 0, width))
    return columns


def _score_column(file: str, spec: TableSpec) -> Column:
    if spec.score_words:
        return Column(file, "words", 8 * len(spec.score_words), words=spec.score_words)
    return Column(file, "ages" if spec.keeps_ages else "scores", 8)


def arguments_file(spec: TableSpec, layout: str, optim: bool, ownership: str) -> tuple[str, str] | None:
    """Name and text of the table's JSON file, if the layout has one."""
    if layout == "v2":
        arguments = spec.original_arguments(ownership)
    elif optim:
        arguments = spec.optimizer_arguments()
    else:
        return None
    return f"{file_stem(spec.name)}_opt_args.json", json.dumps(arguments, indent=4)


@dataclass(frozen=True)
class Floats:
    """Columns [begin, begin + width) of a file of float32 rows that are `row_width` wide."""

    path: Path
    row_width: int
    begin: int
    width: int


@dataclass(frozen=True)
class Part:
    """Files whose rows belong together: all of a table in v1, those of one rank in v2."""

    rows: int
    keys: Path
    values: Floats
    scores: Path | None
    # name in files -> where; with keys of their own in v1a
    states: dict[str, Floats] = field(default_factory=dict)
    state_keys: dict[str, Path] = field(default_factory=dict)
    rank: int | None = None
    words: tuple[str, ...] = ()  # of a score, where it has several
    uses: Path | None = None

    @property
    def files(self) -> list[Path]:
        paths = [self.keys, self.values.path, *(path for path in (self.scores, self.uses) if path)]
        paths += [state.path for state in self.states.values()]
        paths += self.state_keys.values()
        return list(dict.fromkeys(paths))


@dataclass(frozen=True)
class Found:
    """The files of one table in a folder."""

    layout: str
    world: int | None  # of v2
    parts: list[Part]
    arguments: dict[str, Any]  # of {table}_opt_args.json, or empty
    other_scores: bool = False  # there are scores, of another number of words than the table's


def stems_in(folder: Path) -> list[str]:
    """The stems of all tables that have a file in the folder; that of the keys may be lost."""
    stems = set()
    for path in folder.iterdir():
        ranked = _ANY_RANKED.fullmatch(path.name)
        if ranked:
            stems.add(ranked["stem"])
        elif path.name.endswith(("_keys", "_values")) and STATE_MARK not in path.name:
            stems.add(path.name.removesuffix("_keys").removesuffix("_values"))
    return sorted(stems)


def _rows(path: Path, item: int, what: str) -> int:
    size = file_size(path)
    if size % item:
        raise CheckpointError(f"{path}: its {size} bytes are no whole number of {what} of {item} bytes")
    return size // item


def _require(path: Path, rows: int, row_bytes: int) -> None:
    size, expected = file_size(path), rows * row_bytes
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise CheckpointError(
            f"{path}: is {kind}: expected {expected} bytes for {rows} rows of {row_bytes} bytes, found {size}"
        )


def _width(path: Path, rows: int) -> int:
    if rows == 0:
        _require(path, 0, 4)
        return 0
    width = _rows(path, 4 * rows, f"{rows} rows of float32, each")
    if width > MOST_FLOATS:
        raise CheckpointError(f"{path}: expected at most {MOST_FLOATS} floats for each key, found {width}")
    return width


def find(
    folder: Path, stem: str, expected: TableSpec | None, states: bool = True, exact: bool = False
) -> Found:
    """The files of a table, their sizes checked. `expected` tells apart what the files leave open.

    Without `states` those of the optimizer are skipped. With `exact`, rows hold vectors of the expected dim
    and nothing else.
    """
    ranked = [
        match
        for match in (_RANKED.fullmatch(path.name) for path in folder.iterdir())
        if match and match["stem"] == stem
    ]
    plain = folder / f"{stem}_keys"
    arguments = _arguments(folder / f"{stem}_opt_args.json")
    if ranked and os.path.lexists(plain):
        raise CheckpointError(f"{plain}: layouts are mixed, there is {ranked[0].string} beside it")
    if ranked:
        return _find_v2(folder, stem, ranked, arguments, expected, states)
    if not os.path.lexists(plain):
        raise CheckpointError(f"{plain}: is missing (nor is there {stem}_emb_keys.rank_*)")
    return _find_v1(folder, stem, arguments, expected, states, exact)


def _arguments(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    arguments = read_json(path)
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{path}: should be a JSON object")
    return arguments


def _dim(path: Path, rows: int, width: int, expected: TableSpec | None) -> int:
    if rows and not width:
        raise CheckpointError(f"{path}: is truncated: expected vectors for {rows} rows, found 0 bytes")
    if expected is None:
        return width
    if width and width < expected.dim:
        raise CheckpointError(
            f"{path}: expected vectors of {expected.dim} components (dim of table {expected.name!r}), "
            f"found {width}"
        )
    return expected.dim


def _find_v1(
    folder: Path,
    stem: str,
    arguments: dict[str, Any],
    expected: TableSpec | None,
    with_states: bool,
    exact: bool,
) -> Found:
    keys, values, scores = (folder / f"{stem}_{name}" for name in ("keys", "values", "scores"))
    rows = _rows(keys, 8, "keys")
    width = _width(values, rows)
    dim = _dim(values, rows, width, expected)
    prefix = f"{stem}{STATE_MARK}"
    names = sorted(
        path.name[len(prefix) : -len("_keys")]
        for path in folder.iterdir()
        if path.name.startswith(prefix) and path.name.endswith("_keys")
    )
    if expected is None and not names and arguments:
        dim = _dim_of_concatenated(values, width, arguments)
    layout = "v1a"
    states: dict[str, Floats] = {}
    state_keys: dict[str, Path] = {}
    if width > dim:
        if names or exact:
            raise CheckpointError(f"{values}: expected vectors of {dim} components, found {width}")
        layout = "v1b"
        if with_states:
            states = _concatenated_states(values, width, dim, arguments, expected)
        elif not _may_be_concatenated(width, dim, arguments):
            raise CheckpointError(
                f"{values}: expected vectors of {dim} components, found {width}; if optimizer states "
                f"are behind them, load with optim=True"
            )
    for name in names if with_states else []:
        state_keys[name] = folder / f"{prefix}{name}_keys"
        state_values = folder / f"{prefix}{name}_values"
        state_width = _width(state_values, _rows(state_keys[name], 8, "keys"))
        states[name] = Floats(state_values, state_width, 0, state_width)
    part = Part(
        rows,
        keys,
        Floats(values, width or dim, 0, dim),
        _optional(scores, rows, 8),
        states,
        state_keys,
        uses=_optional(folder / f"{stem}_uses", rows, 4),
    )
    return Found(layout, None, [part], arguments)


def _optional(path: Path, rows: int, row_bytes: int) -> Path | None:
    if not os.path.lexists(path):
        return None
    _require(path, rows, row_bytes)
    return path


def _words_in(scores: Path, rows: int) -> int | None:
    """How many words a score has; None without rows or without a file."""
    if not os.path.lexists(scores):
        return None
    words = 2 if rows and file_size(scores) == 16 * rows else 1
    _require(scores, rows, 8 * words)
    return words if rows else None


def _may_be_concatenated(width: int, dim: int, arguments: dict[str, Any]) -> bool:
    """Whether rows are vectors with states behind them, as far as opt_args.json tells: it is there when the
    states are."""
    if "beta1" in arguments:
        return width == 3 * dim
    return "eps" in arguments and (width == 2 * dim or width - dim in ROWWISE_FLOATS)


def _dim_of_concatenated(path: Path, width: int, arguments: dict[str, Any]) -> int:
    if "beta1" not in arguments and "eps" not in arguments:
        return width
    if "beta1" in arguments:
        if width % 3 == 0:
            return width // 3
    elif width % 2 == 0:
        # Adagrad has as much state as vector; a rowwise table can not be told from it, and its user
        # gives the dim by loading into a table.
        return width // 2
    raise CheckpointError(f"{path}: rows of {width} floats do not fit the optimizer of its opt_args.json")


def _concatenated_states(
    path: Path, width: int, dim: int, arguments: dict[str, Any], expected: TableSpec | None
) -> dict[str, Floats]:
    names = expected.file_states() if expected else None
    if names is None:
        kind = "adam" if "beta1" in arguments else "adagrad"
        names = [(name, i * dim, dim) for i, name in enumerate(FILE_STATES[kind].values())]
    return _slices(path, width, dim, names, expected)


def _slices(
    path: Path, width: int, first: int, names: list[tuple[str, int, int]], expected: TableSpec | None
) -> dict[str, Floats]:
    """Where each state lies in rows that are `width` wide, states beginning at column `first`."""
    total = sum(state_width for _, _, state_width in names)
    # A rowwise state fills 16 bytes of the table's dtype, of which the first element counts.
    padded = total == 1 and width - first in ROWWISE_FLOATS
    if width - first != total and not padded:
        name = expected.name if expected else "?"
        raise CheckpointError(
            f"{path}: its rows have {width - first} floats of optimizer state "
            f"but those of table {name!r} have: {total}"
        )
    return {name: Floats(path, width, first + begin, state_width) for name, begin, state_width in names}


def _find_v2(
    folder: Path,
    stem: str,
    ranked: list[re.Match[str]],
    arguments: dict[str, Any],
    expected: TableSpec | None,
    with_states: bool,
) -> Found:
    worlds = sorted({int(match["world"]) for match in ranked})
    if len(worlds) > 1:
        raise CheckpointError(f"{folder / stem}_emb_keys: files of different world sizes are mixed: {worlds}")
    world = worlds[0]
    layout, parts, other_scores = "v2", [], False
    sizes: list[tuple[int, int]] = []  # rows and width of the vectors of each rank
    for rank in range(world):
        keys, values = (folder / f"{stem}_emb_{n}.rank_{rank}.world_size_{world}" for n in ("keys", "values"))
        if not os.path.lexists(keys):
            raise CheckpointError(f"{keys}: is missing, a file of rank {rank} of {world}")
        rows = _rows(keys, 8, "keys")
        sizes.append((rows, _width(values, rows)))
        dim = expected.dim if expected else next((width for _, width in sizes if width), 0)
        if rows and sizes[-1][1] != dim:
            raise CheckpointError(f"{values}: expected vectors of {dim} components, found {sizes[-1][1]}")
    for rank, (rows, _) in enumerate(sizes):
        tail = f".rank_{rank}.world_size_{world}"
        keys, values, scores = (folder / f"{stem}_emb_{n}{tail}" for n in ("keys", "values", "scores"))
        states: dict[str, Floats] = {}
        newest, alpha = folder / f"{stem}_emb_opt_values{tail}", folder / f"{stem}_opt_values{tail}"
        if os.path.lexists(alpha) and not os.path.lexists(newest):
            layout, newest = "v2-alpha", alpha
        if os.path.lexists(newest) and with_states and not other_optimizer(arguments, expected):
            names = expected.file_states() if expected else _original_states(arguments, dim)
            total = sum(width for _, _, width in names)
            states = _slices(newest, _width(newest, rows) if rows else total, 0, names, expected)
        words = expected.score_words if expected else SCORE_WORDS if _words_in(scores, rows) == 2 else ()
        fit = _words_in(scores, rows) in (None, len(words) or 1)
        other_scores |= not fit
        parts.append(
            Part(
                rows,
                keys,
                Floats(values, dim, 0, dim),
                scores if fit and os.path.lexists(scores) else None,
                states,
                rank=rank,
                words=words,
                uses=_optional(folder / f"{stem}_uses{tail}", rows, 4),
            )
        )
    lacking = [part for part in parts if not part.states]
    if with_states and 0 < len(lacking) < world:
        missing = lacking[0].keys.name.replace(
            "_emb_keys.", "_emb_opt_values." if layout == "v2" else "_opt_values."
        )
        raise CheckpointError(f"{folder / missing}: is missing, other ranks have optimizer states")
    return Found(layout, world, parts, arguments, other_scores)


def other_optimizer(arguments: dict[str, Any], expected: TableSpec | None) -> bool:
    """Whether opt_args.json names another optimizer than that of the table."""
    if expected is None or "opt_type" not in arguments or expected.engine_optimizer not in ORIGINAL_TYPES:
        return False
    return bool(arguments["opt_type"] != ORIGINAL_TYPES[expected.engine_optimizer])


def _original_states(arguments: dict[str, Any], dim: int) -> list[tuple[str, int, int]]:
    kinds = {original: ours for ours, original in ORIGINAL_TYPES.items()}
    kind = kinds.get(str(arguments.get("opt_type", "")), "adam" if "beta1" in arguments else "sgd")
    width = 1 if kind == "rowwise_adagrad" else dim
    return [(name, i * width, width) for i, name in enumerate(FILE_STATES.get(kind, {}).values())]
