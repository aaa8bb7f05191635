"""A batch keeps its rows until its own backward has run, however far ahead batches are taken."""

import gc
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from faces.torchrec_dynamic_embedding import ranks, twins
from faces.torchrec_dynamic_embedding.models import DIM, FEATURES, batches, fill, trainer
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward
from torchrec.streamable import Pipelineable

import torchrec_dynamic_embedding as tde
from embstore import Uniform
from torchrec_dynamic_embedding import in_flight
from torchrec_dynamic_embedding.dataloader import DataLoader

NUMBER = iter(range(10**6))
IDS, STEPS = 300, 200


def url():
    return f"memory://flight{next(NUMBER)}"


def same(numbers):
    return numbers


@pytest.fixture(scope="module")
def expected():
    """Batches, the losses of a table with room for all ids, and that table."""
    data = batches(STEPS, IDS, seed=11)
    twin = trainer(IDS)
    fill(twin, IDS)
    return data, twins.train(twin, twins.loader_of(data, of=same)), twin


def room(data, count):
    """The rows that a window needs to hold any `count` batches in a row, and no more."""
    most = 0
    for begin in range(len(data)):
        ids = {"user": set(), "item": set()}
        for _, numbers, lengths in data[begin : begin + count]:
            user, item = np.split(numbers, [int(lengths.reshape(3, -1)[0].sum())])
            ids["user"] |= set(user.tolist())
            ids["item"] |= set(item.tolist())
        most = max(most, *(len(found) for found in ids.values()))
    return most


def wrapped(data, rows, num_prefetch=0, **options):
    ours = trainer(rows)
    address = url()
    loader = tde.wrap(address, data, ours.model, {"emb": ours.configs}, num_prefetch=num_prefetch, **options)
    return ours, loader, address


@pytest.mark.parametrize("num_prefetch", [0, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_taken_ahead_train_as_a_table_with_all_ids(expected, count, num_prefetch):
    data, losses, twin = expected
    ours, loader, address = wrapped(twins.loader_of(data), room(data, count + 1), num_prefetch)
    found = [ours.step(kjt, label) for label, kjt in twins.ahead(loader, count)]
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    tde.save(ours.model)
    twins.compare_rows(address, twin, data, "row_wise", "adagrad")


@dataclass
class Sample(Pipelineable):
    label: torch.Tensor
    kjt: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return Sample(self.label.to(device), self.kjt.to(device))

    def record_stream(self, stream):
        pass

    def pin_memory(self):
        return self


class Loss(nn.Module):
    """What a train pipeline runs: batch in, (losses, output) out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        loss = nn.functional.mse_loss(self.model(batch.kjt)[:, 0], batch.label)
        return loss.reshape(1), loss.detach()


def progress(pipeline, loader):
    """All losses that the pipeline gives."""
    iterator, found = iter(loader), []
    with pytest.raises(StopIteration):
        while True:
            found.append(pipeline.progress(iterator).item())
    return found


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_train_pipeline_base_trains_as_a_table_with_all_ids(expected, num_prefetch):
    data, losses, twin = expected
    samples = [Sample(label, kjt) for label, kjt in twins.loader_of(data)]
    ours, loader, address = wrapped(samples, room(data, 2), num_prefetch)
    pipeline = TrainPipelineBase(Loss(ours.model), ours.optimizer, torch.device("cpu"))
    np.testing.assert_allclose(progress(pipeline, loader), losses, rtol=1e-4)
    tde.save(ours.model)
    twins.compare_rows(address, twin, data, "row_wise", "adagrad")


def sparse_pipeline(kind, ours, data):
    """A pipeline that looks into the model, so the model gets what the loader gives: the ids alone."""
    labels = iter([label for label, *_ in data])

    def forward(kjt):
        loss = nn.functional.mse_loss(ours.model(kjt)[:, 0], next(labels))
        return loss.reshape(1), loss.detach()

    return kind(ours.model, ours.optimizer, torch.device("cpu"), custom_model_fwd=forward)


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_train_pipeline_sparse_dist_trains_as_a_table_with_all_ids(expected, num_prefetch):
    data, losses, twin = expected
    ours, loader, address = wrapped([kjt for _, kjt in twins.loader_of(data)], room(data, 3), num_prefetch)
    pipeline = sparse_pipeline(TrainPipelineSparseDist, ours, data)
    np.testing.assert_allclose(progress(pipeline, loader), losses, rtol=1e-4)
    assert len(pipeline._pipelined_modules) == 1
    tde.save(ours.model)
    twins.compare_rows(address, twin, data, "row_wise", "adagrad")


def test_a_train_pipeline_that_looks_rows_up_ahead_of_time_is_refused():
    """TrainPipelineSemiSync does not run on the CPU; this is what it makes of a model."""
    ours, loader, _ = wrapped([kjt for _, kjt in twins.loader_of(batches(6, 60))], 120)
    emb = ours.model.module.emb
    emb.forward = EmbeddingPipelinedForward("emb", None, emb, None)
    with pytest.raises(RuntimeError, match="looks up rows ahead of time .EmbeddingPipelinedForward."):
        next(iter(loader))


def one(*ids):
    """One sample with these ids of one feature."""
    lengths = torch.tensor([len(ids) if f == "user" else 0 for f in FEATURES])
    return KeyedJaggedTensor(keys=FEATURES, values=torch.tensor(ids, dtype=torch.int64), lengths=lengths)


def vectors(ours, kjt):
    weight = ours.model.state_dict()["emb.embedding_bags.user.weight"].local_shards()[0].tensor
    return weight[kjt.values()].detach().numpy()


def initial(*ids):
    return Uniform(-0.5, 0.5).rows(np.array(ids, np.int64), DIM, table="emb.user")


def rows(begin, count=5):
    return tuple(range(begin, begin + count))


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_batches_that_do_not_fit_raise_with_the_rows_they_need(num_prefetch):
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(6)], 12, num_prefetch)
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]
    text = "user is 12, but 15 rows are needed .* of the batches in flight.*3 are missing, 0 can be made free"
    with pytest.raises(RuntimeError, match=text):
        next(iterator)
    for number, batch in enumerate(taken):
        np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(5 * number)))
        ours.model(batch).sum().backward()
    assert run(ours, loader) == 6, "a new iterator goes on"


def test_a_batch_that_is_used_after_its_rows_were_replaced_raises():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(6)], 12)
    iterator = iter(loader)
    first = next(iterator)
    output = ours.model(first)
    output.sum().backward(retain_graph=True)
    for _ in range(4):
        ours.model(next(iterator))
    for use in (lambda: ours.model(first), lambda: output.sum().backward()):
        with pytest.raises(RuntimeError, match="the rows of batch 0 may have been replaced"):
            use()
    before = initial(*rows(25))
    np.testing.assert_array_equal(vectors(ours, next(iterator)), before)


def test_a_batch_may_be_used_again_until_its_rows_are_needed():
    ours, loader, address = wrapped([one(*rows(5 * i)) for i in range(3)], 64)
    iterator = iter(loader)
    first = next(iterator)
    ours.step(first, torch.zeros(1))
    ours.step(next(iterator), torch.zeros(1))
    next(iterator)
    tde.save(ours.model)
    ours.step(first, torch.ones(1))
    tde.save(ours.model)
    store = twins.open_store(address, table="emb.user", tensor_bytes=[32, 32])
    stored, _, found = store.get(np.array(rows(0)))
    assert found.all()
    np.testing.assert_array_equal(np.ascontiguousarray(stored[:, :32]).view(np.float32), vectors(ours, first))


def run(ours, loader):
    """Trains all batches; how many they were."""
    count = 0
    for batch in loader:
        ours.model(batch).sum().backward()
        count += 1
    return count


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_batches_that_are_evaluated_do_not_stay(num_prefetch):
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(40)], 12, num_prefetch)
    number = 0
    for eval_mode, gradients in ((True, True), (False, False)):
        ours.model.train(not eval_mode)
        outputs = []
        with torch.set_grad_enabled(gradients):
            for number, batch in enumerate(loader):
                outputs.append(ours.model(batch))
                np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(5 * number)))
        assert number == 39


@pytest.mark.parametrize("num_prefetch", [0, 2])
@pytest.mark.parametrize("keep", ["loss", "batch", "nothing"])
def test_batches_without_a_backward_do_not_stay(keep, num_prefetch):
    """A loss that is not finite is skipped, say; the program may keep it, or the batch, for later."""
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(40)], 22, num_prefetch)
    kept = []
    for number, batch in enumerate(loader):
        loss = ours.model(batch).sum()
        if number % 7 == 3:
            kept += {"loss": [loss], "batch": [batch], "nothing": []}[keep]
        else:
            loss.backward()
    assert number == 39
    for thing in kept[:3]:
        with pytest.raises(RuntimeError, match=r"the rows of batch \d+ may have been replaced"):
            thing.backward() if keep == "loss" else ours.model(thing)


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_batches_that_the_model_never_sees_do_not_stay(num_prefetch):
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(40)], 12, num_prefetch)
    assert sum(1 for _ in map(id, loader)) == 40
    iterator = iter(loader)
    first = next(iterator)
    for number, batch in enumerate(iterator):
        if number % 3 == 0:
            ours.model(batch).sum().backward()
        del batch
    assert number == 38
    with pytest.raises(RuntimeError, match=r"the rows of batch \d+ may have been replaced"):
        ours.model(first)


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_a_sample_that_is_kept_does_not_stay(num_prefetch):
    """Of the same loader, or of one for validation, to be looked at now and then."""
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(40)], 17, num_prefetch)
    other = DataLoader(ours.model._id_transformer_group, [one(*rows(500))])
    kept = [next(iter(loader)), next(iter(other))]
    assert run(ours, loader) == 40
    for batch in kept:
        with pytest.raises(RuntimeError, match=r"the rows of batch \d+ may have been replaced"):
            ours.model(batch)


def copied(kjt):
    return KeyedJaggedTensor(
        keys=kjt.keys(), values=kjt.values().clone(), lengths=kjt.lengths(), weights=kjt.weights_or_none()
    )


@pytest.mark.parametrize("num_prefetch", [0, 2])
def test_copies_of_batches_that_were_dropped_train_in_their_order(expected, num_prefetch):
    """As on a GPU, where the model gets copies and the original is gone."""
    data, losses, twin = expected
    ours, loader, address = wrapped(twins.loader_of(data), room(data, 4), num_prefetch)
    sample = next(iter(loader))
    copies = ((label, copied(kjt)) for label, kjt in loader)
    found = [ours.step(kjt, label) for label, kjt in twins.ahead(copies, 2)]
    del sample  # it does not count as one that was copied
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    tde.save(ours.model)
    twins.compare_rows(address, twin, data, "row_wise", "adagrad")


def test_a_copy_whose_rows_were_replaced_raises():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(6)], 12)
    iterator = iter(loader)
    copies = [copied(next(iterator)) for _ in range(4)]
    with pytest.raises(RuntimeError, match="given a copy of a batch.*were replaced"):
        ours.model(copies[0])
    assert run(ours, loader) == 6


def test_a_collection_that_gets_something_made_of_the_batch_is_tracked():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(30)], 22)
    emb = ours.model.module.emb
    emb.register_forward_pre_hook(lambda _, args: (args[0].permute([2, 0, 1]),), prepend=True)
    for number, batch in enumerate(twins.ahead(loader, 2)):
        np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(5 * number)))
        ours.model(batch).sum().backward()


def test_a_thread_that_loads_waits_for_the_one_that_trains():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(30)], 12)
    group = ours.model._id_transformer_group
    ours.model(one())  # this thread trains
    queue, failed = deque(), []
    arrived = threading.Semaphore(0)

    def load():
        try:
            for batch in loader:
                queue.append(batch)
                del batch
                arrived.release()
        except Exception as error:
            failed.append(error)
            arrived.release()

    group.windows.in_flight._trainer = threading.get_ident()
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    for number in range(30):
        assert arrived.acquire(timeout=60)
        assert not failed
        batch = queue.popleft()
        np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(5 * number)))
        ours.model(batch)
        del batch
    thread.join(60)
    assert not thread.is_alive() and not failed


def test_a_loading_thread_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(in_flight, "NO_PROGRESS_SECONDS", 0.2)
    _, loader, _ = wrapped([one(*rows(5 * i)) for i in range(30)], 12)
    failed = []

    def load():
        try:
            list(loader)
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(60)
    assert len(failed) == 1 and "batches in flight" in failed[0]


def test_another_loader_in_mid_epoch_leaves_batches_that_were_taken_alone():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(4)], 22, 1)
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]
    other = DataLoader(ours.model._id_transformer_group, [one(*rows(100 + 2 * i, 2)) for i in range(9)])
    with torch.no_grad():
        for number, batch in enumerate(other):
            np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(100 + 2 * number, 2)))
            ours.model(batch)
            if number == 1:
                break
    for number, batch in enumerate(taken):
        np.testing.assert_array_equal(vectors(ours, batch), initial(*rows(5 * number)))
        ours.model(batch).sum().backward()
    gc.collect()


def test_close_releases_what_was_handed_out():
    ours, loader, _ = wrapped([one(*rows(5 * i)) for i in range(4)], 12)
    iterator = iter(loader)
    taken = [next(iterator), next(iterator)]
    iterator.close()
    assert run(ours, loader) == 4
    with pytest.raises(RuntimeError, match="the rows of batch 1 may have been replaced"):
        ours.model(taken[1])


@pytest.mark.multirank
def test_two_ranks_that_take_batches_ahead_train_as_two_ranks_with_room_for_all_ids(redis):
    ranks.launch("taken_ahead", redis.where, world=2)
