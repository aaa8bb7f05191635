"""What a dump says about a table besides its rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from embstore.optimizers import Optimizer, from_dict
from embstore.options import MOST_DIM, DType, ScoreStrategy
from embstore.ownership import Ownership
from embstore.readable import AGED_BIAS, AGED_FRACTION_BITS
from embstore.table import Table

# The states' names in files: those of the original package where it has the optimizer.
FILE_STATES = {
    "adam": {"exp_avg": "m", "exp_avg_sq": "v"},
    "adagrad": {"sum": "Gt"},
    "rowwise_adagrad": {"sum": "Gt"},
}
ORIGINAL_TYPES = {
    "sgd": "sgd",
    "adam": "adam",
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
}
# Scores of these strategies are nanoseconds of a clock.
CLOCK_STRATEGIES = ("timestamp", "no_eviction")
SCORE_WORDS = ("timestamp", "lfu")
# Fields that older dumps do not have.
OPTIONAL = ("evict_least_used", "score_words", "shared_rows", "shared_by")


def checked(values: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a JSON object. Raises ValueError when it is missing or of another type."""
    value = values.get(name) if isinstance(values, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{name} should be of type {kind.__name__} but is: {_short(value)}")
    return value


def count(values: dict[str, Any], name: str, least: int = 0, most: int = (1 << 62) - 1) -> int:
    """An integer of a JSON object. Raises ValueError when it is another thing or out of bounds."""
    value = values.get(name) if isinstance(values, dict) else None
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} should be an integer from {least} to {most} but is: {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class TableSpec:
    """A table as its dump describes it; everything is plain JSON.

    score           what the next training batch would have given its keys
    states          name and width of each optimizer state, in the order of a row
    evict_least_used  whether keys are evicted by how often they were used
    shared_rows     rows for keys without one of their own, and by what they are chosen (an ownership)
    score_words     of a compound score: what its words are in files of layout v2, else empty
    """

    name: str
    dim: int
    dtype: str
    optimizer: dict[str, Any]
    states: tuple[tuple[str, int], ...]
    score_strategy: str
    score: int
    seed: int
    optimizer_step: int
    learning_rate: float
    initializer: dict[str, Any]
    init_capacity: int
    max_capacity: int
    bucket_capacity: int
    evict_least_used: bool = False
    score_words: tuple[str, ...] = ()
    shared_rows: int = 0
    shared_by: str = ""

    @property
    def counts_uses(self) -> bool:
        """Whether uses are counted beside scores."""
        return self.evict_least_used and self.score_strategy not in ("lfu", "aged_lfu", "importance")

    @property
    def state_width(self) -> int:
        return sum(width for _, width in self.states)

    @property
    def engine_optimizer(self) -> str:
        """The name of the arithmetic, which decides whether states fit."""
        return self.optimizer_object().engine_name

    def optimizer_object(self) -> Optimizer:
        return from_dict(self.optimizer)

    @property
    def keeps_ages(self) -> bool:
        """Whether layout v2 has ages in place of scores."""
        return self.score_strategy == "timestamp" and not self.score_words

    def file_states(self) -> list[tuple[str, int, int]]:
        """(name in files, first column, width) of each state."""
        known = FILE_STATES.get(self.engine_optimizer, {})
        columns, begin = [], 0
        for name, width in self.states:
            columns.append((known.get(name, name), begin, width))
            begin += width
        return columns

    def to_dict(self) -> dict[str, Any]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in given.items() if name not in OPTIONAL or value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TableSpec:
        """The inverse of `to_dict`. Raises ValueError, or what Python raises for a wrong type or a missing
        field, when the values are not those of a table."""
        required = [f.name for f in fields(TableSpec) if f.name not in OPTIONAL]
        known = {name: values[name] for name in required}
        words = tuple(checked({"words": values.get("score_words", [])}, "words", list))
        if words and sorted(words, key=str) != sorted(SCORE_WORDS):
            raise ValueError(f"score_words should be {SCORE_WORDS} in any order but are: {words}")
        least_used = checked({"least_used": values.get("evict_least_used", False)}, "least_used", bool)
        states = tuple((checked({"states": name}, "states", str), int(w)) for name, w in values["states"])
        for name, kind in (("name", str), ("initializer", dict)):
            checked(values, name, kind)
        count(values, "dim", 1, MOST_DIM)
        for name, least in (("optimizer_step", 0), ("init_capacity", 0), ("max_capacity", 1)):
            count(values, name, least)
        count(values, "bucket_capacity", 1)
        count(values, "seed", most=(1 << 64) - 1)
        DType[checked(values, "dtype", str).upper()]
        strategy = ScoreStrategy[checked(values, "score_strategy", str).upper()]
        least_score = AGED_BIAS << AGED_FRACTION_BITS if strategy.ages else 0
        count(values, "score", least_score, most=(1 << 64) - 1)
        shared: dict[str, Any] = {}
        if "shared_rows" in values:
            shared["shared_rows"] = count(values, "shared_rows", 1, 1 << 16)
            shared["shared_by"] = Ownership[checked(values, "shared_by", str).upper()].name.lower()
        spec = TableSpec(
            **{**known, **shared, "states": states, "evict_least_used": least_used, "score_words": words}
        )
        optimizer = replace(spec.optimizer_object(), lr=values["learning_rate"])  # validates both
        if states != tuple(optimizer.state_names(spec.dim)):
            raise ValueError(f"states should be those of {type(optimizer).__name__} but are: {states}")
        return spec

    @staticmethod
    def of(table: Table) -> TableSpec:
        """What there is to say about a table now."""
        options = table.options
        return TableSpec(
            name=table.name,
            dim=table.dim,
            dtype=options.dtype.name.lower(),
            optimizer=options.optimizer.to_dict(),
            states=tuple(options.optimizer.state_names(table.dim)),
            score_strategy=options.score_strategy.name.lower(),
            score=0 if options.score_strategy == ScoreStrategy.LFU else table.score,
            seed=table.seed,
            optimizer_step=table.optimizer_step,
            learning_rate=table.learning_rate,
            initializer={
                "name": type(options.initializer).__name__,
                **{f.name: getattr(options.initializer, f.name) for f in fields(options.initializer)},
            },
            init_capacity=options.init_capacity,
            max_capacity=options.max_capacity,
            bucket_capacity=options.bucket_capacity,
            evict_least_used=options.evict_least_used,
            score_words=table.score_words,
            shared_rows=options.shared_rows,
            shared_by=table.shared_by.name.lower() if options.shared_rows else "",
        )

    def optimizer_arguments(self) -> dict[str, Any]:
        """The contents of `{table}_opt_args.json`."""
        optimizer = self.optimizer_object()
        arguments: dict[str, Any] = {"lr": self.learning_rate}
        counts_steps = "betas" in self.optimizer
        if counts_steps:
            beta1, beta2 = self.optimizer["betas"]
            arguments |= {"iters": self.optimizer_step, "beta1": beta1, "beta2": beta2}
        for name in ("eps", "initial_accumulator_value"):
            if name in self.optimizer:
                arguments[name] = self.optimizer[name]
        if counts_steps:
            arguments["weight_decay"] = optimizer.weight_decay
        return arguments

    def original_arguments(self, ownership: str) -> dict[str, Any]:
        """The same for the newest original layout, where it is the meta file of the table."""
        counts = self.score_strategy in ("lfu", "aged_lfu") or self.score_words
        evict = "KLfu" if counts else "KCustomized"
        arguments = self.optimizer_arguments()
        arguments["opt_type"] = ORIGINAL_TYPES.get(self.engine_optimizer, self.engine_optimizer)
        arguments["evict_strategy"] = f"EvictStrategy.{'KLru' if self.keeps_ages else evict}"
        step = {"lfu": 1, "step": self.score, "customized": self.score}
        arguments["step_score"] = step.get(self.score_strategy, 0)
        arguments["dist_type"] = ownership
        return arguments
