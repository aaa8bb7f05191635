"""Embedding collections for serving from a checkpoint: read-only tables on the CPU.

    collection = create_inference_embedding_collection(configs)
    collection.load_from_dynamicemb_file("/data/monday/model.ec")
    vectors = collection(keys, offsets)            # (n, dim); a missing key reads zeros

The original exports such a module with torch.export and its CUDA library. Here it runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.enumerations import DynamicEmbPoolingMode, DynamicEmbScoreStrategy
from dynamicemb.options import DynamicEmbTableOptions

_NONE, _SUM, _MEAN = -1, 1, 2
_FEWEST_ROWS = 128  # a bucket


class InferenceEmbeddingCollection(nn.Module):
    """Vectors of keys of several tables of one dim.

    table_options      of each table; `dim` has to be set, max_capacity is the rows of a static table
    use_dynamic_hash   whether keys are any integers (rows from a dump) or row numbers (rows of a weight): one
                       for all tables, or one for each
    pooling_mode       -1 none, 1 sum, 2 mean
    table_names        None: "t0", "t1", ...
    feature_names      None: as the tables
    feature_table_map  the table of each feature; None: a feature for each table
    output_dtype       of the vectors
    device             where they go; rows live in host memory
    """

    def __init__(
        self,
        table_options: Sequence[DynamicEmbTableOptions],
        use_dynamic_hash: bool | Sequence[bool],
        pooling_mode: int,
        table_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        feature_table_map: Sequence[int] | None = None,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        key_type: torch.dtype = torch.int64,
    ) -> None:
        super().__init__()
        if pooling_mode not in (_NONE, _SUM, _MEAN):
            raise ValueError(
                f"pooling_mode should be -1 (none), 1 (sum) or 2 (mean) but is: {pooling_mode!r}"
            )
        if key_type != torch.int64:
            raise ValueError(f"key_type should be torch.int64 but is: {key_type}")
        dims = sorted({option.dim or 0 for option in table_options})
        if len(dims) != 1 or dims[0] < 1:
            raise ValueError(f"dim should be the same for all tables and at least 1 but is: {dims}")
        number = len(table_options)
        self.emb_dim_ = dims[0]
        self.embedding_configs = list(table_options)
        self.table_names_ = [f"t{i}" for i in range(number)] if table_names is None else list(table_names)
        self.feature_names_ = list(self.table_names_ if feature_names is None else feature_names)
        self._map = list(range(number)) if feature_table_map is None else list(feature_table_map)
        if any(not 0 <= table < number for table in self._map) or len(self._map) != len(self.feature_names_):
            raise ValueError(
                f"feature_table_map should give each of {self.feature_names_} one of {number} tables "
                f"but is: {self._map}"
            )
        hashed = [use_dynamic_hash] * number if isinstance(use_dynamic_hash, bool) else list(use_dynamic_hash)
        if len(hashed) != number:
            raise ValueError(f"use_dynamic_hash should have {number} bools but has: {len(hashed)}")
        self._pooling, self._dtype, self._device = pooling_mode, output_dtype, device
        self._weights: dict[str, torch.Tensor] = {}
        self._static = [name for name, flag in zip(self.table_names_, hashed, strict=True) if not flag]
        dynamic = [
            (name, option)
            for name, option, flag in zip(self.table_names_, table_options, hashed, strict=True)
            if flag
        ]
        self._tables = [
            BatchedDynamicEmbeddingTablesV2(
                [_read_only(option)], [name], pooling_mode=DynamicEmbPoolingMode.NONE
            ).eval()
            for name, option in dynamic
        ]

    def train(self, mode: bool = True) -> InferenceEmbeddingCollection:
        """Stays in eval: the tables are only read."""
        return super().train(False)

    def load_from_dynamicemb_file(self, save_dir: str, table_names: Sequence[str] | None = None) -> None:
        """Reads dynamic tables from the folder of a collection, of our dumps or of the original's, from any
        number of ranks. Raises ValueError for a table that is none of them."""
        known = [table.table_names[0] for table in self._tables]
        wanted = known if table_names is None else list(table_names)
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"table_names should be among {known} but some are not: {unknown}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="scores of table")  # nobody evicts here
            for table in self._tables:
                if table.table_names[0] in wanted:
                    table.load(save_dir, optim=False, table_names=table.table_names)

    def load_from_embedding_table(self, weights: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Takes the weights (rows, dim) of static tables, by name or in their order."""
        named = dict(weights) if isinstance(weights, Mapping) else dict(zip(self._static, weights))
        if sorted(named) != sorted(self._static):
            raise ValueError(f"weights should be those of {self._static} but are of: {sorted(named)}")
        for name, weight in named.items():
            if weight.dim() != 2 or weight.shape[1] != self.emb_dim_:
                raise ValueError(
                    f"the weight of {name!r} should be (rows, {self.emb_dim_}) but is: {weight.shape}"
                )
            self._weights[name] = weight.detach().to("cpu", torch.float32).clone()

    def _find(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        if name not in self._static:
            module = next(table for table in self._tables if table.table_names == [name])
            found: torch.Tensor = module(keys, torch.arange(keys.numel() + 1))
            return found.float()
        if name not in self._weights:
            raise RuntimeError(f"table {name!r} should get its rows by load_from_embedding_table first")
        weight = self._weights[name]
        there = (keys >= 0) & (keys < weight.shape[0])
        return weight[keys.where(there, torch.zeros_like(keys))] * there.unsqueeze(1)

    def forward(
        self,
        keys: torch.Tensor | KeyedJaggedTensor,
        offsets: torch.Tensor | None = None,
        pooling_offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, JaggedTensor]:
        """Vectors (n, dim) of keys (n) whose samples begin at offsets (features x samples + 1), feature by
        feature; pooled: (bags, dim), of the bags of pooling_offsets, or of offsets where it is None.

        A KeyedJaggedTensor gives a JaggedTensor for each feature, as the module that was replaced did.
        """
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            raise RuntimeError(
                "InferenceEmbeddingCollection runs eagerly and cannot be exported or compiled; "
                "serve the dump with `embstore.serving`, or leave the collection outside of the exported part"
            )
        if isinstance(keys, KeyedJaggedTensor):
            return self._jagged(keys)
        assert offsets is not None, "offsets should be given with keys"
        flat, starts = keys.to("cpu", torch.int64), offsets.to("cpu", torch.int64)
        features = len(self._map)
        samples, rest = divmod(starts.numel() - 1, features)
        if rest or starts.numel() < 1 or int(starts[-1]) != flat.numel():
            raise ValueError(
                f"offsets should be {features} features x samples + 1 numbers up to {flat.numel()} but are: "
                f"{starts.tolist()}"
            )
        bounds = [int(starts[feature * samples]) for feature in range(features)] + [flat.numel()]
        vectors = torch.cat(
            [
                self._find(self.table_names_[table], flat[bounds[feature] : bounds[feature + 1]])
                for feature, table in enumerate(self._map)
            ]
        )
        if per_sample_weights is not None:
            vectors = vectors * per_sample_weights.to("cpu", torch.float32).unsqueeze(1)
        if self._pooling != _NONE:
            ends = starts if pooling_offsets is None else pooling_offsets.to("cpu", torch.int64)
            lengths = ends.diff()
            sums = torch.zeros(lengths.numel(), self.emb_dim_)
            sums.index_add_(0, torch.repeat_interleave(lengths), vectors)
            vectors = sums / lengths.clamp(min=1).unsqueeze(1) if self._pooling == _MEAN else sums
        return vectors.to(device=keys.device if self._device is None else self._device, dtype=self._dtype)

    def _jagged(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        answer = {}
        for name, table in zip(self.feature_names_, self._map, strict=True):
            jagged = features[name]
            vectors = self._find(self.table_names_[table], jagged.values().to("cpu", torch.int64))
            device = jagged.values().device if self._device is None else self._device
            answer[name] = JaggedTensor(
                vectors.to(device=device, dtype=self._dtype), lengths=jagged.lengths()
            )
        return answer


def _read_only(option: DynamicEmbTableOptions) -> DynamicEmbTableOptions:
    return DynamicEmbTableOptions(
        dim=option.dim,
        max_capacity=_FEWEST_ROWS,
        score_strategy=DynamicEmbScoreStrategy.NO_EVICTION,  # it grows to what the dump has
        training=False,
    )


def create_inference_embedding_collection(
    embedding_configs: Sequence[BaseEmbeddingConfig], pooling_mode: int = _NONE, use_dynamic: bool = True
) -> InferenceEmbeddingCollection:
    """The collection of these configs; dynamic tables take the rows of a dump, others those of a weight."""
    return _collection(embedding_configs, pooling_mode, [use_dynamic] * len(embedding_configs), {})


def _collection(
    configs: Sequence[BaseEmbeddingConfig], pooling_mode: int, dynamic: list[bool], sizes: Mapping[str, int]
) -> InferenceEmbeddingCollection:
    options = [
        DynamicEmbTableOptions(dim=c.embedding_dim, max_capacity=sizes.get(c.name, c.num_embeddings))
        for c in configs
    ]
    return InferenceEmbeddingCollection(
        options,
        dynamic,
        pooling_mode,
        [config.name for config in configs],
        [name for config in configs for name in config.feature_names],
        [table for table, config in enumerate(configs) for _ in config.feature_names],
    )


def apply_inference_embedding_collection(
    model: nn.Module,
    dynamic_table_configs: Mapping[str, bool],
    trained_emb_table_sizes: Mapping[str, int],
) -> nn.Module:
    """Replaces each TorchRec EmbeddingCollection in the model by one for serving, and returns the model.

    dynamic_table_configs    which tables are dynamic; others take the weight that they have
    trained_emb_table_sizes  rows of each table, where they are more than in its config
    """

    def replacement(old: EmbeddingCollection) -> InferenceEmbeddingCollection:
        configs: list[EmbeddingConfig] = old.embedding_configs()
        dynamic = [bool(dynamic_table_configs.get(config.name, False)) for config in configs]
        new = _collection(configs, _NONE, dynamic, trained_emb_table_sizes)
        weights: dict[str, Any] = {
            config.name: old.embeddings[config.name].weight
            for config, flag in zip(configs, dynamic, strict=True)
            if not flag and old.embeddings[config.name].weight.device.type != "meta"
        }
        if weights:
            new.load_from_embedding_table(weights)
        return new

    if isinstance(model, EmbeddingCollection):
        return replacement(model)
    for name, child in list(model.named_children()):
        setattr(
            model,
            name,
            apply_inference_embedding_collection(child, dynamic_table_configs, trained_emb_table_sizes),
        )
    return model
