"""Which tables the features of a batch belong to.

    batch                                configs_dict
    {"query": kjt(user),                 {"a": [user, clicked], "b": [shown]}
     "items": kjt(shown, clicked)}

    query   user → a                     the first collection with one of its features
    items   shown → b, clicked → a       the next one that is left; other features where they are known

A feature that no wrapped collection has keeps its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec import KeyedJaggedTensor

from .containers import Steps, jagged_tensors
from .id_transformer_group import IDTransformerGroup
from .jagged_ids import Part

DataInfo = Mapping[Any, str]  # index, key, name of a field, or a tuple of these → path of a collection


@dataclass(frozen=True)
class Mapped:
    """A KeyedJaggedTensor that gets slots, and all places of the batch where it is."""

    kjt: KeyedJaggedTensor
    places: tuple[Steps, ...]
    paths: tuple[str, ...]
    tables: Mapping[str, int]  # feature → number of the table

    @property
    def part(self) -> Part:
        return self.kjt, self.tables


def mapped_tensors(group: IDTransformerGroup, batch: Any, data_info: DataInfo | None) -> list[Mapped]:
    """The KeyedJaggedTensors of the batch that get slots. What cannot be mapped raises ValueError."""
    places: dict[int, list[Steps]] = {}  # of one tensor; it may be there twice
    tensors: dict[int, KeyedJaggedTensor] = {}
    for steps, kjt in jagged_tensors(batch):
        places.setdefault(id(kjt), []).append(steps)
        tensors[id(kjt)] = kjt
    if data_info is None:
        return _by_features(group, [(tensors[key], tuple(where)) for key, where in places.items()])
    found = []
    for place, path in data_info.items():
        steps = _steps(batch, place)
        kjt = next((tensors[key] for key, where in places.items() if steps in where), None)
        if kjt is not None:
            found.append(_mapped(group, kjt, (steps,), path))
        elif not _is_none(batch, steps):
            raise ValueError(
                f"data_info should name KeyedJaggedTensors of a batch ({_shown(places)}) but has: {place!r}"
            )
    return found


def _by_features(
    group: IDTransformerGroup, tensors: list[tuple[KeyedJaggedTensor, tuple[Steps, ...]]]
) -> list[Mapped]:
    found: list[Mapped] = []
    left = list(group.collections)
    for kjt, places in tensors:
        path = next((p for p in left if set(kjt.keys()) & set(group.collections[p].features)), None)
        if path is None:
            known = sorted(f for c in group.collections.values() for f in c.features)
            if not set(kjt.keys()) & set(known):
                raise ValueError(
                    f"the KeyedJaggedTensor at {_shown({0: places})} should have a feature of a wrapped "
                    f"table ({known}) but has: {kjt.keys()}; data_info says which ones get slots"
                )
            raise ValueError(
                f"a batch should have as many KeyedJaggedTensors as there are collections "
                f"({len(group.collections)}), or data_info should say which is whose, "
                f"but it has: {len(tensors)}"
            )
        left.remove(path)
        found.append(_mapped(group, kjt, places, path))
    return found


def _mapped(
    group: IDTransformerGroup, kjt: KeyedJaggedTensor, places: tuple[Steps, ...], path: str
) -> Mapped:
    """Features that the collection at `path` lacks go to the one that has them."""
    own = group.tables(path)
    features: list[str] = kjt.keys()
    tables, paths = {}, [path]
    for feature in features:
        if feature in own:
            tables[feature] = own[feature]
            continue
        others = [other for other, c in group.collections.items() if feature in c.features]
        if len(others) > 1:
            raise ValueError(
                f"the feature {feature!r} should belong to one wrapped collection besides {path!r} "
                f"but is in: {others}"
            )
        for other in others:
            tables[feature] = group.tables(other)[feature]
            paths.append(other)
    if not set(tables) & set(own):
        raise ValueError(
            f"the KeyedJaggedTensor for {path!r} should have one of its features ({sorted(own)}) "
            f"but has: {kjt.keys()}"
        )
    return Mapped(kjt, places, tuple(dict.fromkeys(paths)), tables)


def _steps(batch: Any, place: Any) -> Steps:
    if isinstance(batch, KeyedJaggedTensor) and place == 0:
        return ()
    steps = place if isinstance(place, tuple) else (place,)
    result: list[Any] = []
    for step in steps:
        if isinstance(batch, (tuple, list)) and isinstance(step, int) and -len(batch) <= step < 0:
            step += len(batch)
        result.append(step)
        batch = _child(batch, step)
    return tuple(result)


def _child(value: Any, step: Any) -> Any:
    try:
        return value[step] if isinstance(value, (tuple, list, Mapping)) else getattr(value, step)
    except (LookupError, TypeError, AttributeError):
        return ...  # neither there nor None


def _is_none(batch: Any, steps: Steps) -> bool:
    """Whether the place is there and holds None: a batch without this part."""
    for step in steps:
        batch = _child(batch, step)
    return batch is None


def _shown(places: Mapping[int, Any]) -> str:
    return ", ".join(
        "batch" + "".join(f"[{step!r}]" for step in steps) for where in places.values() for steps in where
    )
