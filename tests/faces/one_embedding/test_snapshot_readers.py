"""Snapshots of an embedding that goes on training."""

import numpy as np
import torch

import one_embedding as oe

IDS = torch.arange(-48, 49) * 7919


def test_a_snapshot_is_read_while_the_embedding_is_open_and_replaces_it(tmp_path):
    embedding = oe.MultiTableEmbedding(
        "read-while-open",
        6,
        torch.float,
        torch.int64,
        [oe.make_table(oe.make_uniform_initializer(-1, 1))],
        oe.make_cached_ssd_store_options(1, str(tmp_path)),
    )
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        embedding.train()(IDS).square().sum().backward()
        optimizer.step()
        return embedding.eval()(IDS).numpy().copy()

    def read(reader):
        keys, values = map(np.concatenate, zip(*reader))
        order = np.argsort(keys)
        np.testing.assert_array_equal(keys[order], IDS.numpy())
        return values[order]

    kinds = (np.int64, np.float32, 6)
    first = train()
    embedding.save_snapshot("latest")
    with oe.make_persistent_table_reader(str(tmp_path / "0-1"), "latest", *kinds) as reader:
        for _ in range(3):
            latest = train()
            embedding.save_snapshot("latest")
        np.testing.assert_array_equal(read(reader), first)
    with oe.make_persistent_table_reader(str(tmp_path / "0-1"), "latest", *kinds) as reader:
        np.testing.assert_array_equal(read(reader), latest)
    embedding.save_snapshot("latest")
    assert [p.name for p in (tmp_path / "0-1" / "snapshots").iterdir()] == ["latest"]
