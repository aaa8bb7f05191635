"""embstore against tables of a fixed size, which need no hashing: they get row numbers.

forward-D             the forward half of a training step, 4M rows of dim D, against FBGEMM TBE
sgd-D                 forward + backward + EXACT_SGD, against FBGEMM TBE
rowwise-adagrad-D     forward + backward + EXACT_ROWWISE_ADAGRAD, against FBGEMM TBE
adam-D                forward + backward + Adam on the touched rows, against
                      nn.Embedding(sparse=True) + torch.optim.SparseAdam

All return one vector an id, (65536, D), and get a gradient of that shape. FBGEMM can do that in two ways on
CPU, with the same result, and both are shown: PoolingMode.NONE, and PoolingMode.SUM over bags of one id,
which trained 2 to 9 times faster in trials with 1M rows. Its bounds check is off, which spares it a pass.
All sides start from the same rows, and must hold the same rows in the end.
Adam at dim 128 has 2M rows, so that both sides together take 8 GB and not 16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import embstore
from embstore.optimizers import EpsPlacement

from .ids import Batches, zipf_batches
from .machine import row_lines
from .registry import Row, Run, register
from .tables import INITIALIZER_BOUND, require_same, twin_of
from .timing import Side, interleave, rate, set_threads

LEARNING_RATE = 0.01
GRADIENT_SCALE = 0.1
EPS = 1e-8

Forward = Callable[[torch.Tensor], torch.Tensor]
Marks = dict[int, tuple[float, float]]  # wanted and goal, by threads


@dataclass(frozen=True)
class Peer:
    against: str
    forward: Forward  # row numbers -> vectors
    weights: torch.Tensor
    marks: Marks
    after_backward: Callable[[], None] | None = None


def fbgemm(rows: int, dim: int, optimizer: str, batch: int, pooling: str, marks: Marks) -> Peer:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[optimizer],
        pooling_mode=PoolingMode[pooling],
        bounds_check_mode=BoundsCheckMode.NONE,
        learning_rate=LEARNING_RATE,
        eps=EPS,
        device="cpu",
    )
    # One sequence is the faster form of NONE, and one id a bag makes SUM the same function.
    offsets = torch.tensor([0, batch]) if pooling == "NONE" else torch.arange(batch + 1)
    against = f"FBGEMM TBE, static, {'NONE' if pooling == 'NONE' else 'SUM of 1 id'}"
    return Peer(against, lambda ids: table(ids, offsets), table.split_embedding_weights()[0], marks)


def sparse_adam(rows: int, dim: int) -> Peer:
    table = nn.Embedding(rows, dim, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=LEARNING_RATE, eps=EPS)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Peer("nn.Embedding(sparse=True) + SparseAdam", table, table.weight.detach(), ADAM_MARKS, step)


def side(forward: Forward, ids: list[torch.Tensor], grad: torch.Tensor | None, peer: Peer | None) -> Side:
    """A step is a forward pass and, where a gradient is given, the backward pass and the update."""

    def step(number: int) -> None:
        out = forward(ids[number % len(ids)])
        if grad is not None:
            out.backward(grad)
            if peer is not None and peer.after_backward is not None:
                peer.after_backward()

    return Side(step)


def traffic(module: Any, ids: list[torch.Tensor], train: bool) -> dict[str, float]:
    """What a step has to move: a line of the index and the lines of the row for each distinct id, and
    each output (read for ownership and written); in training each gradient too (read)."""
    distinct = sum(len(torch.unique(batch)) for batch in ids) / len(ids)
    vector_bytes = 4 * module.table.dim
    lines = 1 + row_lines(module.table.row_bytes if train else vector_bytes)
    outputs = len(ids[0]) * vector_bytes
    return {"lines": distinct * lines, "copied_bytes": outputs * (1.5 if train else 1.0)}


def compare(
    run: Run, work: str, peers: list[Peer], optimizer: Any, batches: Batches, train: bool
) -> Iterator[Row]:
    first = peers[0].weights.uniform_(-INITIALIZER_BOUND, INITIALIZER_BOUND)
    for peer in peers[1:]:
        peer.weights.copy_(first)
    ours = twin_of(first, optimizer)
    grad = torch.randn(run.sizes.batch, first.shape[1]) * GRADIENT_SCALE if train else None

    def own_grad() -> torch.Tensor | None:
        # A shared one would be in the cache for the second side, left there by the first.
        return None if grad is None else grad.clone()

    sides = [side(ours, batches.keys, own_grad(), None)]
    sides += [side(peer.forward, batches.rows, own_grad(), peer) for peer in peers]
    inserts = ours.table.stats().inserts
    moved = traffic(ours, batches.keys, train)
    for threads in run.threads:
        set_threads(threads)
        our_time, *their_times = interleave(sides, run.sizes.rounds, run.sizes.warmup_rounds)
        for peer, their_time in zip(peers, their_times, strict=True):
            detail = rate(run.sizes.batch, our_time, their_time)
            share = run.share(threads, our_time, **moved)
            wanted, goal = peer.marks[min(threads, max(peer.marks))]
            yield Row(work, peer.against, threads, their_time / our_time, wanted, goal, detail, share)
    if ours.table.stats().inserts != inserts:
        raise RuntimeError("all ids should be resident but some were inserted")
    with torch.no_grad():
        for peer in peers:
            require_same(ours(batches.keys[0]), peer.forward(batches.rows[0]))
    ours.table.close()


def against_fbgemm(
    run: Run, name: str, dim: int, fbgemm_optimizer: str, optimizer: Any, train: bool, *marks: Marks
) -> Iterator[Row]:
    """`marks` are those against NONE and against SUM."""
    sizes = run.sizes
    batches = zipf_batches(sizes.rows, sizes.batch, sizes.batches)
    peers = [
        fbgemm(sizes.rows, dim, fbgemm_optimizer, sizes.batch, pooling, own)
        for pooling, own in zip(("NONE", "SUM"), marks, strict=True)
    ]
    work = f"{name}, {sizes.rows:,} rows, dim {dim}"
    yield from compare(run, work, peers, optimizer, batches, train)


FORWARD_MARKS = {
    32: {1: (1.0, 1.25), 2: (1.2, 1.5)},
    64: {1: (1.0, 1.25), 2: (1.5, 2.0)},
    128: {1: (3.0, 3.0), 2: (6.0, 6.0)},
}
SGD_MARKS = {
    32: {1: (1.6, 2.5), 2: (2.0, 2.5)},
    64: {1: (1.6, 2.5), 2: (2.5, 2.5)},
    128: {1: (1.6, 2.5), 2: (2.5, 2.5)},
}
# They were set where a step took a fourth of the time of NONE. SUM does the same work several times as
# fast, so there it is enough to be faster.
ROWWISE_ADAGRAD_MARKS = {
    "avx512": {1: (4.0, 6.0), 2: (6.0, 10.0)},
    "avx2": {1: (3.0, 6.0), 2: (5.0, 10.0)},
    "plain": {1: (1.0, 1.0), 2: (1.0, 1.0)},
}
FASTER = {1: (1.0, 1.0)}
ADAM_MARKS = {1: (8.0, 12.0), 2: (10.0, 12.0)}


def register_dim(dim: int) -> None:
    @register(f"forward-{dim}")
    def forward(run: Run) -> Iterator[Row]:
        sgd = embstore.SGD(lr=LEARNING_RATE)
        yield from against_fbgemm(run, "forward", dim, "EXACT_SGD", sgd, False, *2 * [FORWARD_MARKS[dim]])

    @register(f"sgd-{dim}")
    def sgd(run: Run) -> Iterator[Row]:
        sgd = embstore.SGD(lr=LEARNING_RATE)
        yield from against_fbgemm(run, "SGD step", dim, "EXACT_SGD", sgd, True, *2 * [SGD_MARKS[dim]])

    @register(f"rowwise-adagrad-{dim}")
    def rowwise_adagrad(run: Run) -> Iterator[Row]:
        adagrad = embstore.RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS)
        marks = ROWWISE_ADAGRAD_MARKS[embstore.isa()]
        name = "row-wise Adagrad step"
        yield from against_fbgemm(run, name, dim, "EXACT_ROWWISE_ADAGRAD", adagrad, True, marks, FASTER)

    @register(f"adam-{dim}")
    def adam(run: Run) -> Iterator[Row]:
        sizes = run.sizes
        rows = sizes.rows // 2 if dim >= 128 else sizes.rows
        batches = zipf_batches(rows, sizes.batch, sizes.batches)
        work = f"Adam step, {rows:,} rows, dim {dim}"
        # SparseAdam adds eps to sqrt(v) before the bias correction, as Keras does.
        optimizer = embstore.Adam(lr=LEARNING_RATE, eps=EPS, eps_placement=EpsPlacement.KERAS)
        yield from compare(run, work, [sparse_adam(rows, dim)], optimizer, batches, True)


for _dim in (32, 64, 128):
    register_dim(_dim)
