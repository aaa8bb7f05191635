"""Interleaved timing: every side runs every step, one after the other, and medians are compared."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import embstore

# The OpenMP workers of torch go on spinning for 4 to 9 ms after a parallel region. On a machine with as many
# cores as threads they would take a core from the side that comes next, so it waits until they sleep. Such a
# pause lets cores and caches go cold, as training never does: the first steps after it are not timed.
SETTLE_SECONDS = 0.010
UNTIMED_STEPS = 4


@dataclass(frozen=True)
class Side:
    step: Callable[[int], None]  # timed; gets the number of the step
    prepare: Callable[[int], None] | None = None  # not timed; runs before each step


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
    embstore.set_num_threads(count)


def interleave(
    sides: Sequence[Side],
    rounds: int,
    warmup_rounds: int,
    steps: int = 16,
    first_step: int = 0,
    settle_seconds: float = SETTLE_SECONDS,
) -> list[float]:
    """Median seconds of a step for each side. In a round each side in turn makes a few steps to get warm and
    then `steps` more, which are timed together. Sides that do not use torch's threads need not settle."""
    seconds: list[list[float]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup_rounds + rounds):
            for side_times, side in zip(seconds, sides, strict=True):
                time.sleep(settle_seconds)
                spent = 0.0
                for step in range(UNTIMED_STEPS + steps):
                    number = first_step + round_ * (UNTIMED_STEPS + steps) + step
                    if side.prepare is not None:
                        side.prepare(number)
                    start = time.perf_counter()
                    side.step(number)
                    if step >= UNTIMED_STEPS:
                        spent += time.perf_counter() - start
                if round_ >= warmup_rounds:
                    side_times.append(spent / steps)
    finally:
        gc.enable()
    return [statistics.median(times) for times in seconds]


def rate(ids: int, ours: float, theirs: float) -> str:
    """The two sides in words: "ours 21.3, theirs 18.9 M ids/s"."""
    return f"ours {ids / ours / 1e6:.2f}, theirs {ids / theirs / 1e6:.2f} M ids/s"
