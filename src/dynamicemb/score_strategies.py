"""Score strategies of one word or of two, and how the words of a compound lie in files.

normalize_score_strategy((LFU,))                     LFU
normalize_score_strategy((LFU, TIMESTAMP))           (LFU, TIMESTAMP): evicted by count, dumped by time
"""

from __future__ import annotations

from dynamicemb.enumerations import DynamicEmbScoreStrategy

ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]

_TIMESTAMP, _LFU = DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU
SUPPORTED_COMPOUND_SCORE_STRATEGIES = (frozenset({_TIMESTAMP, _LFU}),)


def normalize_score_strategy(strategy: ScoreStrategy | None) -> ScoreStrategy | None:
    """The strategy in its shortest form: a tuple of one becomes its element; None stays None.

    Raises TypeError for anything but strategies, NotImplementedError for a tuple that is empty, repeats a
    strategy, or is not TIMESTAMP and LFU.
    """
    if strategy is None or isinstance(strategy, DynamicEmbScoreStrategy):
        return strategy
    if not isinstance(strategy, tuple) or not all(isinstance(s, DynamicEmbScoreStrategy) for s in strategy):
        raise TypeError(
            f"score_strategy should be a DynamicEmbScoreStrategy or a tuple of them but is: {strategy!r}"
        )
    if len(strategy) == 1:
        return strategy[0]
    if len(strategy) != 2 or frozenset(strategy) not in SUPPORTED_COMPOUND_SCORE_STRATEGIES:
        raise NotImplementedError(
            f"score_strategy of several words should be TIMESTAMP and LFU, in either order, "
            f"but is: {strategy!r}"
        )
    return strategy


def validate_score_strategy(strategy: ScoreStrategy | None) -> None:
    """Raises what `normalize_score_strategy` raises."""
    normalize_score_strategy(strategy)


def get_eviction_score_strategy(strategy: ScoreStrategy | None) -> DynamicEmbScoreStrategy | None:
    """The strategy that decides which rows go: of a compound, the one that is not TIMESTAMP."""
    normal = normalize_score_strategy(strategy)
    if isinstance(normal, tuple):
        return next(s for s in normal if s != _TIMESTAMP)
    return normal


def score_strategy_has_timestamp_column(strategy: ScoreStrategy | None) -> bool:
    """Whether one of the words of a score is a time."""
    normal = normalize_score_strategy(strategy)
    return normal == _TIMESTAMP or isinstance(normal, tuple)


def get_physical_score_order(strategy: ScoreStrategy | None) -> tuple[DynamicEmbScoreStrategy, ...]:
    """The words of a score in the order of memory: (TIMESTAMP, LFU) for a compound."""
    normal = normalize_score_strategy(strategy)
    if normal is None:
        return ()
    return (_TIMESTAMP, _LFU) if isinstance(normal, tuple) else (normal,)


def score_dump_permutation(strategy: ScoreStrategy | None) -> list[int]:
    """For each column of a score file, in the user's order, its column in memory."""
    normal = normalize_score_strategy(strategy)
    physical = get_physical_score_order(normal)
    return [physical.index(s) for s in (normal if isinstance(normal, tuple) else physical)]


def score_load_permutation(strategy: ScoreStrategy | None) -> list[int]:
    """For each column in memory, its column in a score file: the inverse of `score_dump_permutation`."""
    dumped = score_dump_permutation(strategy)
    return [dumped.index(column) for column in range(len(dumped))]
