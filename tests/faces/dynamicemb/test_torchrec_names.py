"""The package refuses a TorchRec that lacks what it uses, when it is imported."""

import pytest
import torchrec
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dynamicemb import torchrec_names


def test_the_tested_torchrec_has_all_names():
    assert torchrec_names.missing_names() == []


def test_a_name_that_is_gone_is_told_with_the_tested_version(monkeypatch):
    place = "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection"
    names = {place: ("_lookups", "_gone"), "torchrec.distributed.nowhere:Nothing": ("a",)}
    monkeypatch.setattr(torchrec_names, "NAMES", names)
    monkeypatch.setattr(torchrec, "__version__", "9.9.9")
    with pytest.raises(ImportError) as told:
        torchrec_names.require_names()
    assert "tested with TorchRec 1.8.0" in str(told.value) and "TorchRec 9.9.9 lacks" in str(told.value)
    assert "ShardedEmbeddingBagCollection._gone, torchrec.distributed.nowhere.Nothing" in str(told.value)


def test_attributes_that_only_methods_set_are_seen():
    names = torchrec_names.names_of(ShardedEmbeddingBagCollection)
    assert "_pooling_type_to_rs_features" in names and "_pooling_type_to_rs_featurez" not in names
    assert not hasattr(ShardedEmbeddingBagCollection, "_pooling_type_to_rs_features")
