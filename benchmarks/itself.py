"""embstore against itself: what eviction costs, and what a second thread brings.

evict                      forward with 5 % new ids a batch, each of which evicts a row, in a table at load
                           factor 1.0, against a table as full whose ids are all resident; dim 32
quality-cost               training steps of tables that keep frequent ids and have a shared row, against
                           the same with timestamps: with room for all ids, and full with 5 % new ids a batch;
                           and the forward pass of the full one against one that only hits
threads-forward-D          the forward half of a training step, 2 threads against 1
threads-rowwise-adagrad-D  forward + backward + row-wise Adagrad, 2 threads against 1
sample-misses              the same step with `Table.sample_misses` on, against a twin without; dim 32
"""

from collections.abc import Iterator
from typing import Any

import torch

import embstore

from .ids import NewIds, zipf_batches
from .registry import Row, Run, register
from .static_tables import EPS, GRADIENT_SCALE, LEARNING_RATE, traffic
from .tables import INITIALIZER_BOUND, embedding, fill, full_embedding, twin_of
from .timing import Side, interleave, rate

SHARE = 0.05


@register("evict")
def evict(run: Run) -> Iterator[Row]:
    sizes = run.sizes
    dim, rows = 32, sizes.full_capacity_rows
    batches = zipf_batches(rows, sizes.batch, sizes.batches)
    arrivals = NewIds(batches, SHARE, first=1 << 40)
    evicting, hitting = (
        full_embedding(dim, embstore.SGD(lr=LEARNING_RATE), rows, first=rows) for _ in range(2)
    )
    for keys in batches.keys:
        evicting(keys)
        hitting(keys)
    ids = batches.keys[0]

    def arrive(step: int) -> None:
        nonlocal ids
        ids = arrivals.at(step)

    def recur(step: int) -> None:
        nonlocal ids
        ids = batches.keys[step % len(batches.keys)].clone()  # a copy, to be as warm as the arrivals

    def forward(module: torch.nn.Module) -> None:
        module(ids)

    sides = [Side(lambda _: forward(evicting), arrive), Side(lambda _: forward(hitting), recur)]
    work = f"forward, 5 % new ids, full table, {rows:,} rows, dim {dim}"
    torch.set_num_threads(1)  # it copies ids between the steps, and its workers would go on spinning
    for threads in run.threads:
        embstore.set_num_threads(threads)
        before = evicting.table.stats()
        inserts = hitting.table.stats().inserts
        our_time, their_time = interleave(
            sides, sizes.rounds, sizes.warmup_rounds, first_step=threads << 20, settle_seconds=0
        )
        after = evicting.table.stats()
        if hitting.table.stats().inserts != inserts:
            raise RuntimeError("all ids should be resident but some were inserted")
        gone, new = after.evictions - before.evictions, after.inserts - before.inserts
        refused = after.refusals - before.refusals
        detail = (
            f"{rate(sizes.batch, our_time, their_time)}; {gone:,} evictions, {new:,} new, {refused} refused"
        )
        yield Row(work, "itself, all hits", threads, their_time / our_time, 0.8, 0.9, detail)
    evicting.table.close()
    hitting.table.close()


GOOD = {"score_strategy": "lfu", "admission": "frequency", "shared_rows": 1}


@register("quality-cost")
def quality_cost(run: Run) -> Iterator[Row]:
    sizes = run.sizes
    dim, rows = 32, sizes.full_capacity_rows
    batches = zipf_batches(rows, sizes.batch, sizes.batches)
    grad = torch.randn(sizes.batch, dim) * GRADIENT_SCALE
    torch.set_num_threads(1)

    def made(capacity: int, first: int, **options: Any) -> Any:
        module = embedding(dim, embstore.Adagrad(lr=LEARNING_RATE), capacity, **options)
        for keys in batches.keys:
            module(keys)
        fill(module.table, first, rows)
        return module

    def measured(
        ours: Any, theirs: Any, ids: NewIds | None, train: bool, threads: int
    ) -> tuple[float, float]:
        batch = [batches.keys[0], batches.keys[0]]

        def side(number: int, module: Any, new: bool) -> Side:
            def prepare(step: int) -> None:
                known = batches.keys[step % len(batches.keys)].clone()
                batch[number] = ids.at(step) if ids and new else known

            def run_step(_: int) -> None:
                out = module(batch[number])
                if train:
                    out.backward(grad)

            return Side(run_step, prepare)

        return interleave(
            [side(0, ours, True), side(1, theirs, train)],
            sizes.rounds,
            sizes.warmup_rounds,
            first_step=threads << 20,
            settle_seconds=0,
        )

    arrivals = NewIds(batches, SHARE, first=1 << 40)
    cases = [
        ("Adagrad step, room for all ids", "timestamps", 2 * rows, None, True, 0.95),
        ("Adagrad step, full, 5 % new ids", "timestamps", rows, arrivals, True, 0.9),
        ("forward, full, 5 % new ids", "itself, all hits", rows, arrivals, False, 0.8),
    ]
    for work, against, capacity, ids, train, wanted in cases:
        other = {"score_strategy": "timestamp"} if train else GOOD
        ours, theirs = made(capacity, rows, **GOOD), made(capacity, rows, **other)
        for threads in run.threads:
            embstore.set_num_threads(threads)
            our_time, their_time = measured(ours, theirs, ids, train, threads)
            stats = ours.table.stats()
            detail = f"{rate(sizes.batch, our_time, their_time)}; {stats.evictions:,} evictions"
            yield Row(
                f"{work}, {rows:,} rows, dim {dim}",
                against,
                threads,
                their_time / our_time,
                wanted,
                None,
                detail,
            )
        ours.table.close()
        theirs.table.close()


def two_threads(run: Run, dim: int, train: bool) -> Iterator[Row]:
    if 2 not in run.threads:
        return
    sizes = run.sizes
    batches = zipf_batches(sizes.rows, sizes.batch, sizes.batches)
    weights = torch.empty(sizes.rows, dim).uniform_(-INITIALIZER_BOUND, INITIALIZER_BOUND)
    optimizer = (
        embstore.RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS) if train else embstore.SGD(lr=LEARNING_RATE)
    )
    module = twin_of(weights, optimizer)
    grad = torch.randn(sizes.batch, dim) * GRADIENT_SCALE

    def side(threads: int, shift: int) -> Side:
        # The sides share one table, so they take the batches half a cycle apart: the same batch twice in a
        # row would be in the cache for the second one.
        def step(number: int) -> None:
            out = module(batches.keys[(number + shift) % len(batches.keys)])
            if train:
                out.backward(grad)

        return Side(step, lambda _: embstore.set_num_threads(threads))

    sides = [side(2, 0), side(1, sizes.batches // 2)]
    work = f"{'row-wise Adagrad step' if train else 'forward'}, {sizes.rows:,} rows, dim {dim}"
    our_time, their_time = interleave(sides, sizes.rounds, sizes.warmup_rounds, settle_seconds=0)
    detail = rate(sizes.batch, our_time, their_time)
    share = run.share(2, our_time, **traffic(module, batches.keys, train))
    yield Row(work, "itself, 1 thread", 2, their_time / our_time, 1.8, 1.95, detail, share)
    module.table.close()


@register("sample-misses")
def sample_misses(run: Run) -> Iterator[Row]:
    sizes, dim = run.sizes, 32
    batches = zipf_batches(sizes.rows, sizes.batch, sizes.batches)
    weights = torch.empty(sizes.rows, dim).uniform_(-INITIALIZER_BOUND, INITIALIZER_BOUND)
    sampling, plain = (twin_of(weights, embstore.RowwiseAdagrad(lr=LEARNING_RATE, eps=EPS)) for _ in range(2))
    sampling.table.sample_misses()
    grad = torch.randn(sizes.batch, dim) * GRADIENT_SCALE

    def side(module: torch.nn.Module) -> Side:
        return Side(lambda step: module(batches.keys[step % len(batches.keys)]).backward(grad))

    for threads in run.threads:
        embstore.set_num_threads(threads)
        sides = [side(sampling), side(plain)]
        our_time, their_time = interleave(sides, sizes.rounds, sizes.warmup_rounds, settle_seconds=0)
        detail = (
            f"{rate(sizes.batch, our_time, their_time)}; 1 in {1 / sampling.table.miss_sample().rate:.0f}"
        )
        work = f"row-wise Adagrad step, misses sampled, {sizes.rows:,} rows, dim {dim}"
        yield Row(work, "itself, not sampled", threads, their_time / our_time, 0.98, 1.0, detail)
    sampling.table.close()
    plain.table.close()


def register_dim(dim: int) -> None:
    @register(f"threads-forward-{dim}")
    def forward(run: Run) -> Iterator[Row]:
        yield from two_threads(run, dim, train=False)

    @register(f"threads-rowwise-adagrad-{dim}")
    def rowwise_adagrad(run: Run) -> Iterator[Row]:
        yield from two_threads(run, dim, train=True)


for _dim in (32, 64, 128):
    register_dim(_dim)
