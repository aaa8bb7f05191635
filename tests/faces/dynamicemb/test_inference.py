"""Embedding collections for serving, from our dumps and from those of the original package."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from faces.dynamicemb.small_tables import options, tables
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from dynamicemb import DynamicEmbDump, DynamicEmbScoreStrategy
from dynamicemb.exportable_tables import (
    InferenceEmbeddingCollection,
    apply_inference_embedding_collection,
    create_inference_embedding_collection,
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A dump of two tables: keys 7 and 9 of t0 and 7 of t1, whose vectors are all different."""
    module = tables(options(), options())
    for step in range(3):
        out = module(torch.tensor([7, 9, 7]), torch.tensor([0, 1, 2, 3, 3]))
        (out * torch.arange(1.0, out.numel() + 1 + step)[: out.numel()].view_as(out)).sum().backward()
    DynamicEmbDump(str(tmp_path / "d"), torch.nn.ModuleDict({"ec": module}), counter=True)
    return str(tmp_path / "d" / "model.ec")


def _vectors(folder: str, table: str) -> dict[int, list[float]]:
    tail = ".rank_0.world_size_1"
    keys = np.fromfile(f"{folder}/{table}_emb_keys{tail}", np.int64)
    values = np.fromfile(f"{folder}/{table}_emb_values{tail}", np.float32).reshape(-1, 4)
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("pooling", [-1, 1, 2])
def test_a_collection_reads_a_dump_and_zeros_where_a_key_is_missing(
    folder: str, manifest: bool, pooling: int
) -> None:
    if not manifest:
        os.remove(f"{folder}/embstore.json")
    collection = InferenceEmbeddingCollection([options(), options()], True, pooling, ["t0", "t1"], ["a", "b"])
    collection.load_from_dynamicemb_file(folder)
    assert (collection.emb_dim_, collection.table_names_, collection.feature_names_) == (
        4,
        ["t0", "t1"],
        ["a", "b"],
    )
    keys, offsets = torch.tensor([7, 9, 1 << 60, 7]), torch.tensor([0, 2, 3, 3, 4])
    t0, t1 = _vectors(folder, "t0"), _vectors(folder, "t1")
    each = torch.tensor([t0[7], t0[9], [0.0] * 4, t1.get(7, [0.0] * 4)])
    expected = each
    if pooling != -1:
        expected = torch.stack([each[:2].sum(0), each[2], torch.zeros(4), each[3]])
        expected[0] /= 2 if pooling == 2 else 1
    assert torch.equal(collection.train()(keys, offsets), expected), "it stays in eval"
    assert collection(keys, offsets).dtype == torch.float32
    with pytest.raises(ValueError, match="offsets should be"):
        collection(keys, offsets[:-1])
    with pytest.raises(ValueError, match="some are not: ..t9"):
        collection.load_from_dynamicemb_file(folder, ["t9"])


def test_a_dump_with_more_rows_than_the_config_says_is_served_whole(tmp_path: Path) -> None:
    module = tables(options(score_strategy=DynamicEmbScoreStrategy.STEP))
    keys = torch.arange(500) * 7
    module(keys, torch.arange(501)).sum().backward()
    module.dump(str(tmp_path / "d"))
    config = EmbeddingConfig(name="t0", num_embeddings=20, embedding_dim=4, feature_names=["f"])
    collection = create_inference_embedding_collection([config])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collection.load_from_dynamicemb_file(str(tmp_path / "d"))
    assert (collection(keys, torch.arange(501)) == -0.25).all()


def test_bad_arguments_are_named() -> None:
    for pooling in (0, 3, None):
        with pytest.raises(ValueError, match="pooling_mode should be"):
            InferenceEmbeddingCollection([options()], True, pooling)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim should be the same"):
        InferenceEmbeddingCollection([options(), options(dim=5)], True, -1)
    with pytest.raises(ValueError, match="key_type"):
        InferenceEmbeddingCollection([options()], True, -1, key_type=torch.int32)
    static = InferenceEmbeddingCollection([options()], False, -1)
    with pytest.raises(RuntimeError, match="load_from_embedding_table first"):
        static(torch.tensor([1]), torch.tensor([0, 1]))


def test_a_model_s_collections_are_replaced_in_place(folder: str) -> None:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=[f"f_{name}"])
        for name in ("t0", "fixed")
    ]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = torch.nn.Sequential(EmbeddingCollection(tables=configs))

        def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
            return {name: jagged.values() for name, jagged in self.sparse(features).items()}

    model = Model()
    batch = KeyedJaggedTensor(["f_t0", "f_fixed"], torch.tensor([7, 9, 3]), lengths=torch.tensor([2, 1]))
    static = model(batch)["f_fixed"].detach()
    assert apply_inference_embedding_collection(model, {"t0": True}, {"t0": 1000}) is model
    served = model.sparse[0]
    assert isinstance(served, InferenceEmbeddingCollection)
    served.load_from_dynamicemb_file(folder, ["t0"])
    answer = model(batch)
    assert answer["f_t0"].tolist() == [_vectors(folder, "t0")[key] for key in (7, 9)]
    assert torch.equal(answer["f_fixed"], static)


def test_export_is_refused_with_what_to_do() -> None:
    collection = create_inference_embedding_collection(
        [EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
    )
    with pytest.raises(Exception, match="runs eagerly and cannot be exported"):
        torch.export.export(collection, (torch.tensor([1, 2]), torch.tensor([0, 1, 2])), strict=False)
