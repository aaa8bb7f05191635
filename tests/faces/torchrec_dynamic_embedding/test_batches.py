"""Batches of all shapes come back with slots in place of ids, and as what they were."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from faces.torchrec_dynamic_embedding.models import DIM, BagSharder, trainer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_dynamic_embedding as tde

NUMBER = iter(range(10**6))
Pair = namedtuple("Pair", ["label", "kjt"])


@dataclass(frozen=True)
class Frozen:
    kjt: KeyedJaggedTensor
    label: str = "l"
    hidden: int = field(default=3, init=False)


@dataclass
class Slotted:
    __slots__ = ("kjt", "label")
    kjt: KeyedJaggedTensor
    label: str


class Plain:
    def __init__(self, kjt):
        self.kjt = kjt
        self.myself = self  # a cycle


def jagged(**features):
    """A batch of one sample."""
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([i for ids in features.values() for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in features.values()]),
    )


def ids(*values):
    return jagged(user=list(values), clicked=[], shown=[])


def wrapped(data, **options):
    ours = trainer(64)
    return tde.wrap(f"memory://shape{next(NUMBER)}", data, ours.model, {"emb": ours.configs}, **options)


SHAPES = {
    "bare": (lambda k: k, lambda b: b),
    "tuple": (lambda k: (1, k), lambda b: b[1]),
    "list": (lambda k: [k, "text"], lambda b: b[0]),
    "named tuple": (lambda k: Pair(1.0, k), lambda b: b.kjt),
    "dict": (lambda k: {"label": None, "kjt": k}, lambda b: b["kjt"]),
    "ordered dict": (lambda k: OrderedDict(a=1, kjt=k), lambda b: b["kjt"]),
    "dataclass": (lambda k: Frozen(k), lambda b: b.kjt),
    "dataclass with slots": (lambda k: Slotted(k, "l"), lambda b: b.kjt),
    "plain object": (lambda k: Plain(k), lambda b: b.kjt),
    "nested": (lambda k: ({"x": [1, Pair(2, Frozen(k))]},), lambda b: b[0]["x"][1].kjt.kjt),
}


@pytest.mark.parametrize("num_prefetch", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_keeps_its_type(shape, num_prefetch):
    make, find = SHAPES[shape]
    originals = [make(ids(70, -9)), make(ids(-9, 5))]
    found = list(wrapped(originals, num_prefetch=num_prefetch))
    assert [find(batch).values().tolist() for batch in found] == [[0, 1], [1, 2]]
    for batch, original in zip(found, originals):
        assert type(batch) is type(original) and batch is not original
        assert find(original).values().tolist() in ([70, -9], [-9, 5]), "the batch of the user stays"


def test_what_holds_no_ids_is_handed_through():
    inner, label = [1, {"x": 2}], object()
    [found] = wrapped([{"kjt": ids(7), "inner": inner, "label": label}])
    assert found["inner"] is inner and found["label"] is label and list(found) == ["kjt", "inner", "label"]
    [found] = wrapped([Frozen(ids(7), label="own")])
    assert found.label == "own" and found.hidden == 3
    [found] = wrapped([(label,)])
    assert found[0] is label


def test_ids_that_come_only_in_later_batches_are_mapped():
    found = list(wrapped([{"kjt": None}, {"kjt": ids(70)}, {"other": 1, "kjt": ids(80, 70)}]))
    assert found[0] == {"kjt": None}
    assert [batch["kjt"].values().tolist() for batch in found[1:]] == [[0], [1, 0]]


def test_one_tensor_in_two_places_stays_one():
    kjt = ids(70)
    [found] = wrapped([{"a": kjt, "b": [kjt]}])
    assert found["a"] is found["b"][0] and found["a"].values().tolist() == [0]


def test_features_of_no_table_keep_their_values():
    [found] = wrapped([jagged(user=[70], weather=[99, 98], clicked=[70, 71])])
    assert found.values().tolist() == [0, 99, 98, 0, 1]


@pytest.mark.parametrize(
    ("batch", "options", "text"),
    [
        (
            jagged(weather=[1]),
            {},
            "at batch should have a feature of a wrapped table .* but has: .'weather'.",
        ),
        ({"x": [jagged(weather=[1])]}, {}, r"at batch\['x'\]\[0\] should have"),
        ((ids(1), jagged(weather=[1])), {}, r"at batch\[1\] should have"),
        ((ids(1), ids(2)), {}, "as many KeyedJaggedTensors as there are collections"),
        ({"kjt": ids(1)}, {"data_info": {"typo": "emb"}}, r"of a batch .batch\['kjt'\]. but has: 'typo'"),
        ({"kjt": ids(1)}, {"data_info": {("kjt", 3): "emb"}}, "but has: .'kjt', 3."),
        ((1, ids(1)), {"data_info": {0: "emb"}}, "but has: 0"),
        ((1, ids(1)), {"data_info": {-3: "emb"}}, "but has: -3"),
        ((jagged(weather=[1]),), {"data_info": {0: "emb"}}, "should have one of its features"),
    ],
)
@pytest.mark.parametrize("num_prefetch", [0, 1])
def test_ids_that_cannot_be_mapped_are_an_error(batch, options, text, num_prefetch):
    with pytest.raises(ValueError, match=text):
        next(iter(wrapped([batch], num_prefetch=num_prefetch, **options)))


@pytest.mark.parametrize(
    ("batch", "place", "find"),
    [
        (ids(70), 0, lambda b: b),
        (ids(70), (), lambda b: b),
        ((ids(1), ids(70)), -1, lambda b: b[1]),
        ({"a": ids(1), "b": ids(70)}, "b", lambda b: b["b"]),
        (Frozen(ids(70)), "kjt", lambda b: b.kjt),
        ([ids(1), {"x": Frozen(ids(70))}], (1, "x", "kjt"), lambda b: b[1]["x"].kjt),
    ],
)
def test_data_info_names_places_of_all_kinds(batch, place, find):
    [found] = wrapped([batch], data_info={place: "emb"})
    assert find(found).values().tolist() == [0]


def test_data_info_accepts_a_batch_without_that_part():
    found = list(wrapped([{"kjt": None}, {"kjt": ids(70)}], data_info={"kjt": "emb"}))
    assert found[0]["kjt"] is None and found[1]["kjt"].values().tolist() == [0]


class TwoCollections(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.a = EmbeddingBagCollection(tables=first, device=torch.device("meta"))
        self.b = EmbeddingBagCollection(tables=second, device=torch.device("meta"))


def two_collections():
    def config(name, *features):
        return EmbeddingBagConfig(
            name=name, num_embeddings=16, embedding_dim=DIM, feature_names=list(features)
        )

    configs = {"a": [config("user", "user")], "b": [config("item", "shown", "clicked"), config("x", "both")]}
    configs["a"].append(config("y", "both"))
    model = DistributedModelParallel(
        TwoCollections(configs["a"], configs["b"]),
        device=torch.device("cpu"),
        sharders=[BagSharder(fused_params={"learning_rate": 0.1})],
    )
    return model, configs


def test_each_tensor_goes_to_the_collection_that_has_its_features():
    model, configs = two_collections()
    both, items, users = jagged(both=[4], user=[70]), jagged(shown=[70, 8]), jagged(user=[6, 70])
    data = [(items,), (users, items), (items, users), (both, items), (jagged(user=[8], shown=[8]),)]
    found = list(tde.wrap(f"memory://shape{next(NUMBER)}", data, model, configs))
    values = [[kjt.values().tolist() for kjt in batch] for batch in found]
    assert values == [[[0, 1]], [[0, 1], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [0, 1]], [[2, 1]]]


def test_configs_that_do_not_fit_the_model_are_refused():
    for change, text in (
        ({"feature_names": ["user", "extra"]}, "feature_names of emb.user .* but are: .'user', 'extra'."),
        ({"num_embeddings": 65}, "num_embeddings of emb.user .*64. but is: 65"),
    ):
        ours = trainer(64)
        configs = copy.deepcopy(ours.configs)
        for name, value in change.items():
            setattr(configs[0], name, value)
        with pytest.raises(ValueError, match=text):
            tde.wrap(f"memory://shape{next(NUMBER)}", [], ours.model, {"emb": configs})
