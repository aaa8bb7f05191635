"""What this package uses of TorchRec beside its documented names, and whether it is there.

A TorchRec that lacks one of them would fail in the middle of training, or compute something else; so they are
looked for when the package is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

TESTED = "1.8.0"

NAMES: Mapping[str, Sequence[str]] = {
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": (
        "_embedding_bag_configs",
        "_embedding_names",
        "_embedding_shardings",
        "_env",
        "_has_mean_pooling_callback",
        "_is_weighted",
        "_lookups",
        "_pooling_type_to_rs_features",
        "create_embedding_bag_sharding",
        "create_grouped_sharding_infos",
        "module_sharding_plan",
    ),
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": (
        "_embedding_configs",
        "_env",
        "_lookups",
        "_sharding_type_to_sharding",
        "_use_index_dedup",
        "create_embedding_sharding",
        "create_grouped_sharding_infos",
        "module_sharding_plan",
    ),
    "torchrec.distributed.embedding:EmbeddingCollectionSharder": ("_use_index_dedup",),
    "torchrec.distributed.planner.enumerators:EmbeddingEnumerator": (
        "_constraints",
        "_filter_compute_kernels",
        "_filter_sharding_types",
    ),
    "torchrec.distributed.model_parallel:DistributedModelParallel": ("_dmp_wrapped_module", "module"),
}


def _used_by(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used_by(constant)


def names_of(kind: type) -> set[str]:
    """Attributes of a class and those that its methods set or read, inherited ones too."""
    names = set(dir(kind))
    for base in kind.__mro__:
        for member in vars(base).values():
            function: Any = getattr(member, "__func__", member)
            function = getattr(function, "fget", None) or getattr(function, "__wrapped__", function)
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                names.update(_used_by(code))
    return names


def missing_names() -> list[str]:
    """Names of NAMES that this TorchRec lacks."""
    missing = []
    for place, wanted in NAMES.items():
        module, _, name = place.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(place.replace(":", "."))
            continue
        found = names_of(kind)
        missing += [f"{name}.{attribute}" for attribute in wanted if attribute not in found]
    return missing


def require_names() -> None:
    """Raises ImportError where TorchRec lacks a name that this package uses."""
    missing = missing_names()
    if missing:
        import torchrec

        version = getattr(torchrec, "__version__", "of an unknown version")
        raise ImportError(
            f"dynamicemb is tested with TorchRec {TESTED}; TorchRec {version} lacks what it uses: "
            f"{', '.join(missing)}. Install it with: pip install --no-deps torchrec=={TESTED}"
        )
