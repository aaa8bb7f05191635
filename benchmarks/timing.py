"""Interleaved timing: every side runs every step, one after the other, and medians are compared."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import embstore

# The OpenMP workers of torch go on spinning for 4 to 9 ms after a parallel region. On a machine with as many
# cores as threads they would take a core from the side that comes next, so it waits until they sleep.
SETTLE_SECONDS = 0.010


@dataclass(frozen=True)
class Side:
    step: Callable[[int], None]  # timed; gets the number of the step
    prepare: Callable[[int], None] | None = None  # not timed; runs before each step


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
    embstore.set_num_threads(count)


def interleave(
    sides: Sequence[Side], rounds: int, warmup_rounds: int, steps: int = 1, first_step: int = 0
) -> list[float]:
    """Median seconds of a round for each side; a round is `steps` steps, interleaved step by step.

    More than one step a round is for a peer whose steps differ by design, such as one that does its
    housekeeping in every second step: a median of single steps would show the one kind only.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup_rounds + rounds):
            spent = [0.0] * len(sides)
            for step in range(steps):
                number = first_step + round_ * steps + step
                for side_number, side in enumerate(sides):
                    if side.prepare is not None:
                        side.prepare(number)
                    time.sleep(SETTLE_SECONDS)
                    start = time.perf_counter()
                    side.step(number)
                    spent[side_number] += time.perf_counter() - start
            if round_ >= warmup_rounds:
                for times, value in zip(seconds, spent, strict=True):
                    times.append(value)
    finally:
        gc.enable()
    return [statistics.median(times) for times in seconds]


def rate(ids: int, ours: float, theirs: float) -> str:
    """The two sides in words: "ours 21.3, theirs 18.9 M ids/s"."""
    return f"ours {ids / ours / 1e6:.2f}, theirs {ids / theirs / 1e6:.2f} M ids/s"
