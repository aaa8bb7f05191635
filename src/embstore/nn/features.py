"""The features of a batch: one request each, merged to one a table.

user     keys of table "u"  ─┐
friend   keys of table "u"  ─┴─►  one request of "u": a key that both have is updated once
item     keys of table "i"  ───►  one request of "i"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from embstore.nn.batch import Request


@dataclass(slots=True, eq=False)
class Asked:
    """A feature of a batch; `weights` are the caller's, which may want a gradient."""

    request: Request
    weights: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Of the answer."""
        return self.request.bags if self.request.pooling else self.request.keys.numel()


@dataclass(slots=True, eq=False)
class Merged:
    """The features of one table."""

    names: list[str]
    sizes: list[int]
    asked: Asked

    def split(self, answer: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(self.names) == 1:
            return {self.names[0]: answer}
        return dict(zip(self.names, answer.split(self.sizes), strict=True))


def present(known: Iterable[str], inputs: Mapping[str, Any]) -> list[str]:
    """Features of the input, in the order of the collection. Raises ValueError for an unknown one."""
    names = dict.fromkeys(known)
    unknown = [feature for feature in inputs if feature not in names]
    if unknown:
        raise ValueError(f"features should be among {list(names)} but are: {unknown}")
    return [feature for feature in names if feature in inputs]


def merge(asked: Mapping[str, Asked]) -> list[Merged]:
    """One request for each table, in the order of the features."""
    groups: dict[str, list[str]] = {}
    for name, feature in asked.items():
        groups.setdefault(feature.request.table.name, []).append(name)
    return [
        Merged(names, [asked[name].rows for name in names], _joined([asked[name] for name in names]))
        for names in groups.values()
    ]


def _joined(parts: list[Asked]) -> Asked:
    if len(parts) == 1:
        return parts[0]
    first = parts[0].request
    merged = Request(first.table, torch.cat([part.request.keys for part in parts]), first.pooling)
    if not first.pooling:
        return Asked(merged)
    offsets, base = [torch.zeros(1, dtype=torch.int64)], 0
    for part in parts:
        assert part.request.offsets is not None
        offsets.append(part.request.offsets[1:] + base)
        base += part.request.keys.numel()
    merged.offsets = torch.cat(offsets)
    given = None
    if any(part.weights is not None for part in parts):
        given = torch.cat(
            [
                torch.ones(part.request.keys.numel())
                if part.weights is None
                else part.weights.to("cpu", torch.float32).reshape(-1)
                for part in parts
            ]
        )
        merged.weights = given.detach().contiguous()
    return Asked(merged, given)
