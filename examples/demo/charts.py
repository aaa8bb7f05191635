"""Charts as inline SVG. Colours are CSS variables of the page, so one picture serves the light and the dark
theme; curves differ in their dashes too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 264
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 22, 44
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """A curve and its name. `kind` is one of a, b, c: its colour and dashes."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = "a"


def short(value: float) -> str:
    """1500 as 1.5k, 2000000 as 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def two_places(value: float) -> str:
    return f"{value:.2f}"


def percent(value: float) -> str:
    return f"{value * 100:.3g}%"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """Axes with their scales: x and y turn a value into a place in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log_x: bool) -> None:
        self.log_x = log_x
        self.low_x, self.high_x = self._scale(min(xs)), self._scale(max(xs))
        low, high = min(ys), max(ys)
        room = (high - low or abs(high) or 1.0) * 0.06
        self.low_y, self.high_y = (low if low == 0 else low - room), high + room

    def _scale(self, x: float) -> float:
        return math.log2(x) if self.log_x else x

    def x(self, value: float) -> float:
        span = (self.high_x - self.low_x) or 1.0
        return LEFT + (self._scale(value) - self.low_x) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        if not self.log_x:  # steps: there is no half of one
            return [value for value in ticks(self.low_x, self.high_x) if value == round(value)]
        first, last = math.ceil(self.low_x), math.floor(self.high_x)
        return [2.0**n for n in range(first, last + 1, max(1, (last - first) // 4))]

    def axes(self, x_name: str, x_format: Format, y_format: Format) -> list[str]:
        parts = []
        for value in ticks(self.low_y, self.high_y, 5):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_format(value)}</text>')
        bottom = HEIGHT - BOTTOM
        parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
        for value in self.x_ticks():
            x = self.x(value)
            parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{x_format(value)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{html.escape(x_name)}</text>')
        return parts


def _svg(parts: list[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">'
    return head + "".join(parts) + "</svg>"


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_name: str,
    x_format: Format = short,
    y_format: Format = short,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    log_x: bool = False,
) -> str:
    """Curves over one pair of axes. `marks` are vertical lines with a word beside them."""
    xs = [x for line in lines for x in line.xs] + [x for x, _ in marks]
    ys = [y for line in lines for y in line.ys] + ([0.0] if from_zero else [])
    frame = _Frame(xs, ys, log_x)
    parts = frame.axes(x_name, x_format, y_format)
    for x, word in marks:
        at = frame.x(x)
        anchor = "end" if at > WIDTH / 2 else "start"
        parts.append(f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{TOP - 8}" text-anchor="{anchor}">{html.escape(word)}</text>')
    for line in lines:
        points = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(line.xs, line.ys))
        parts.append(
            f'<path class="line {line.kind}" d="M{points}"><title>{html.escape(line.name)}</title></path>'
        )
    return _svg(parts, label)


def bar_chart(edges: Sequence[float], counts: Sequence[float], *, label: str, x_name: str) -> str:
    """A histogram: counts[i] lies between edges[i] and edges[i + 1]."""
    frame = _Frame(edges, [0.0, *counts], log_x=False)
    parts = frame.axes(x_name, short, short)
    for left, right, count in zip(edges, edges[1:], counts):
        x, y = frame.x(left), frame.y(count)
        width, height = frame.x(right) - x - 1, frame.y(0) - y
        title = f"<title>{short(left)} to {short(right)}: {count:,.0f}</title>"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{title}</rect>'
        )
    return _svg(parts, label)


def legend(lines: Sequence[Line]) -> str:
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 24 8"><path class="line {line.kind}" d="M0 4H24"/></svg>'
        f"{html.escape(line.name)}</span>"
        for line in lines
    )
    return f'<p class="legend">{keys}</p>'
