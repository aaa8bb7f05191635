"""What ranks do in the tests of sharded modules. Every function runs on all ranks of a group.

A step has one global batch, whatever the number of ranks: each rank takes its part of the samples, of which
there may be none.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import embstore

SAMPLES = 17
IDS = torch.cat([torch.arange(20) * 7919 - 60_000, torch.tensor([-(2**63), 2**63 - 1, 0, -1])])
DIMS = {"a": 3, "b": 5}
FEATURES = {"u": "a", "v": "b", "w": "a"}  # u and w share a table
RULES = {
    "sgd": (embstore.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (embstore.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (embstore.Adam(lr=0.1), None),
}
KINDS = ("embedding", "bag sum", "bag mean", "bag weighted", "collection", "bag collection")


def table(name: str, rule: str, **options: Any) -> embstore.TableOptions:
    keywords = {"seed": 5, "score_strategy": "step", "initializer": embstore.Normal(0, 1), **options}
    return embstore.TableOptions(name=name, dim=DIMS[name], optimizer=RULES[rule][0], **keywords)


def module_of(kind: str, rule: str = "adagrad", **keywords: Any) -> Any:
    keywords = {"sharded": True, **keywords}
    if "collection" in kind:
        made = embstore.EmbeddingBagCollection if "bag" in kind else embstore.EmbeddingCollection
        return made([table("a", rule), table("b", rule)], FEATURES, **keywords)
    if kind == "embedding":
        return embstore.Embedding(table=embstore.Table(table("a", rule)), **keywords)
    mode = "mean" if "mean" in kind else "sum"
    return embstore.EmbeddingBag(table=embstore.Table(table("a", rule)), mode=mode, **keywords)


def crowded(world_of_batches: int, steps: int, restart: str | None = None) -> tuple[Any, Any]:
    """Trains a table whose keys get a row at their third occurrence and else train shared rows. Returns own
    and shared rows."""
    options = table("a", "adagrad", admission_threshold=3, shared_rows=4)

    def make() -> Any:
        return embstore.Embedding(table=embstore.Table(options), sharded=True)

    module, rank, world = make(), dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        if restart and step == steps // 2:
            embstore.dump(restart, {"m": dict(module.tables)}, optim=True)
            module = make()
            embstore.load(restart, {"m": dict(module.tables)}, optim=True)
        rows, *_ = batch_of(step, "u")
        parts = np.array_split(rows.numpy(), world_of_batches)
        share = world_of_batches // world
        out = module(IDS[np.concatenate(parts[rank * share : (rank + 1) * share])])
        (out.square().sum() * (world / world_of_batches)).backward()
    return module.table.rows(), module.table.shared_rows()


def expiring(world_of_batches: int, steps: int) -> tuple[Any, int]:
    """Trains a table whose rows expire, on few ids a step. Returns the rows and how many expired."""
    module = embstore.Embedding(table=embstore.Table(table("a", "adagrad", ttl=3)), sharded=True)
    rank, share = dist.get_rank(), world_of_batches // dist.get_world_size()
    for step in range(steps):
        parts = np.array_split(batch_of(step, "u")[0].numpy()[:6], world_of_batches)
        out = module(IDS[np.concatenate(parts[rank * share : (rank + 1) * share])])
        (out.square().sum() / share).backward()
    return module.table.rows(), module.table.stats().expired


def drifting(step: int, n: int = 600) -> torch.Tensor:
    """The ids of a global batch: few are frequent, and others every other step."""
    ids = 5000 ** np.random.default_rng(step).random(n)
    return torch.from_numpy(ids.astype(np.int64) + 31 * (step // 2))


def evicting(steps: int, threads: int, restart: str = "", folder: str = "", only: int = -1) -> Any:
    """Trains a module of the default strategy that evicts and ages, restarted in the middle from a dump or a
    log. `only`: one rank that gets the ids of this rank of two. Returns all that the table knows."""
    embstore.set_num_threads(threads)
    rank, world = dist.get_rank(), dist.get_world_size()

    def make() -> Any:
        return embstore.Embedding(
            3, name="a", max_capacity=97, half_life=7, seed=5, optimizer=embstore.Adam(lr=0.1), sharded=True
        )

    try:
        module = make()
        if restart == "log":
            log = embstore.IncrementLog.create(folder, {"m": dict(module.tables)})
        for step in range(steps):
            tables = {"m": dict(module.tables)}
            if restart == "log" and step % 5 == 4:
                log.append(tables)
            if restart == "dump" and step == steps // 2:
                embstore.dump(folder, tables, optim=True)
                module = make()
                embstore.load(folder, {"m": dict(module.tables)}, optim=True)
            if restart == "log" and step == steps // 2:
                log.append(tables)
                module, log = make(), embstore.IncrementLog(folder)
                log.load({"m": dict(module.tables)}, writable=True)
            ids = drifting(step)
            if only >= 0:
                ids = ids[embstore.owner(ids.numpy(), 2) == only]
            vectors = module(torch.from_numpy(np.array_split(ids.numpy(), world)[rank]))
            (vectors.square().sum() * world).backward()
        table = module.table
        counters = table.admission_counters()
        assert counters is not None and table.stats().evictions > 100
        own, shared = table.rows(), table.shared_rows()
        return [
            *(getattr(rows, f).tobytes() for rows in (own, shared) for f in ("keys", "values", "states")),
            own.scores.tobytes(),
            counters.tobytes(),
            table.score,
        ]
    finally:
        embstore.set_num_threads(1)


def part_of(step: int, rank: int, world: int) -> slice:
    """Other parts at every step; with several ranks one of them is empty now and then."""
    cuts = np.random.default_rng(step).integers(0, SAMPLES + 1, world - 1)
    if world > 1 and step % 3 == 0:
        cuts[0] = 0
    bounds = [0, *sorted(cuts.tolist()), SAMPLES]
    return slice(bounds[rank], bounds[rank + 1])


def batch_of(step: int, feature: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows of IDS (n), lengths (samples), weights (n), targets (samples, dim) of the global batch."""
    generator = torch.Generator().manual_seed(100 * step + ord(feature))
    lengths = torch.randint(0, 4, (SAMPLES,), generator=generator)
    n = int(lengths.sum())
    rows = torch.randint(0, len(IDS), (n,), generator=generator)
    target = torch.randn(SAMPLES, DIMS[FEATURES[feature]], generator=generator)
    return rows, lengths, torch.rand(n, generator=generator), target


def features_of(kind: str) -> list[str]:
    return list(FEATURES) if "collection" in kind else ["u"]


def local_batch(step: int, feature: str, part: slice) -> tuple[torch.Tensor, ...]:
    rows, lengths, weights, target = batch_of(step, feature)
    first, last = int(lengths[: part.start].sum()), int(lengths[: part.stop].sum())
    lengths = lengths[part]
    offsets = torch.cumsum(lengths, 0) - lengths
    return rows[first:last], offsets, weights[first:last], target[part], lengths


def answers(module: Any, kind: str, step: int, part: slice) -> dict[str, torch.Tensor]:
    inputs = {f: local_batch(step, f, part) for f in features_of(kind)}
    if kind == "collection":
        return module({f: IDS[rows] for f, (rows, *_) in inputs.items()})
    if kind == "bag collection":
        return module({f: (IDS[rows], offsets) for f, (rows, offsets, *_) in inputs.items()})
    rows, offsets, weights, *_ = inputs["u"]
    if kind == "embedding":
        return {"u": module(IDS[rows])}
    return {"u": module(IDS[rows], offsets, weights if kind == "bag weighted" else None)}


def oracle_answers(dense: dict[str, Any], kind: str, step: int, part: slice) -> dict[str, torch.Tensor]:
    found = {}
    for f in features_of(kind):
        rows, offsets, weights, _, _ = local_batch(step, f, part)
        weight = dense[FEATURES[f]]
        if kind in ("embedding", "collection"):
            found[f] = weight[rows]
            continue
        mode = "mean" if "mean" in kind else "sum"
        given = weights if kind == "bag weighted" else None
        found[f] = torch.nn.functional.embedding_bag(
            rows, weight, offsets, mode=mode, per_sample_weights=given
        )
    return found


def loss_of(found: dict[str, torch.Tensor], kind: str, step: int, part: slice) -> torch.Tensor:
    losses = []
    for f, vectors in found.items():
        *_, target, lengths = local_batch(step, f, part)
        if "bag" not in kind:
            target = target.repeat_interleave(lengths, 0)
        losses.append((vectors - target).square().sum())
    return sum(losses)


def rows_of(module: Any) -> dict[str, embstore.Rows]:
    return {name: t.rows() for name, t in module.tables.items()}


def train(kind: str, rule: str, steps: int, divide: int = 1, first: int = 0, **keywords: Any) -> Any:
    """Losses of this rank and the rows that it owns. `divide` is for one rank that stands for several."""
    module = module_of(kind, rule, **keywords)
    return train_on(module, kind, steps, divide, first)


def train_on(module: Any, kind: str, steps: int, divide: int = 1, first: int = 0) -> Any:
    losses = []
    for step in range(first, first + steps):
        part = part_of(step, dist.get_rank(), dist.get_world_size())
        loss = loss_of(answers(module, kind, step, part), kind, step, part) / divide
        loss.backward()
        if not module.update_in_backward:
            module.step()
        losses.append(loss.item())
    owned = [embstore.owner(t.rows().keys, dist.get_world_size()) for t in module.tables.values()]
    assert all((ranks == dist.get_rank()).all() for ranks in owned)
    return losses, rows_of(module), {name: t.optimizer_step for name, t in module.tables.items()}


def twins(kind: str, rule: str, steps: int, **keywords: Any) -> None:
    """A static table, trained on the batches of all ranks, has the losses of every rank."""
    module = module_of(kind, rule, **keywords)
    rank, world = dist.get_rank(), dist.get_world_size()
    dense = {name: torch.nn.Parameter(embstore.Table(table(name, rule)).initial_values(IDS)) for name in DIMS}
    optimizer = RULES[rule][1](list(dense.values()))
    for step in range(steps):
        part = part_of(step, rank, world)
        loss = loss_of(answers(module, kind, step, part), kind, step, part)
        loss.backward()
        optimizer.zero_grad()
        parts = [part_of(step, other, world) for other in range(world)]
        oracles = [loss_of(oracle_answers(dense, kind, step, p), kind, step, p) for p in parts]
        torch.testing.assert_close(loss, oracles[rank], rtol=2e-5, atol=2e-5)
        (sum(oracles) / world).backward()  # DistributedDataParallel averages gradients
        optimizer.step()
    module.eval()
    part = slice(rank, SAMPLES - rank)
    ours, theirs = (f(m, kind, 99, part) for f, m in ((answers, module), (oracle_answers, dense)))
    if "bag" not in kind:
        for f, vectors in theirs.items():
            seen = [s for s in features_of(kind) if FEATURES[s] == FEATURES[f]]
            trained = torch.cat([batch_of(step, s)[0] for step in range(steps) for s in seen])
            known = torch.isin(local_batch(99, f, part)[0], trained)
            expected = vectors.detach() * known.unsqueeze(1)  # a missing id reads 0.0
            torch.testing.assert_close(ours[f], expected, rtol=2e-5, atol=2e-5)
    assert not any(v.requires_grad for v in ours.values())


def weight_gradients(training: bool) -> list[torch.Tensor]:
    """Of the weights of this rank, and what torch has for them."""
    module = module_of("bag weighted", "sgd")
    world = dist.get_world_size()
    answers(module, "bag weighted", 0, part_of(0, dist.get_rank(), world))
    module.train(training)
    weight = module_vectors(module)
    rows, offsets, weights, target, _ = local_batch(0, "u", part_of(1, dist.get_rank(), world))
    found = []
    for look_up in (
        lambda w: module(IDS[rows], offsets, w),
        lambda w: torch.nn.functional.embedding_bag(rows, weight, offsets, mode="sum", per_sample_weights=w),
    ):
        w = weights.clone().requires_grad_()
        (look_up(w) * target).sum().backward()
        found.append(w.grad)
    return found


def module_vectors(module: Any) -> torch.Tensor:
    """Of all IDS, read in evaluation by every rank."""
    mode = module.training
    vectors = module.eval()(IDS.view(-1, 1)).detach()
    module.train(mode)
    return vectors


def scaler(patient: bool) -> list[Any]:
    """A GradScaler on every rank; in steps 2 and 5 the gradients of one rank are not finite. Returns what the
    scale became, and for each step whether the rows moved."""
    module = module_of("embedding", "sgd", update_in_backward=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = None if patient else torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    told = []
    for step in range(7):
        before = rows_of(module)["a"]
        part = part_of(step, rank, world)
        loss = loss_of(answers(module, "embedding", step, part), "embedding", step, part)
        if step in (2, 5) and rank == world - 1:
            loss = loss + math.inf * answers(module, "embedding", step, slice(0, SAMPLES))["u"].sum()
        elif step in (2, 5):
            answers(module, "embedding", step, slice(0, 0))["u"].sum().backward()
        scaler.scale(loss).backward()
        if optimizer is None:
            moved = module.step(1 / scaler.get_scale())
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = scaler.get_scale() == scaler._init_scale
        told.append((moved, step))
        after = rows_of(module)["a"]
        if step in (2, 5):
            known = np.isin(after.keys, before.keys)
            np.testing.assert_array_equal(after.values[known], before.values)
    return [told, scaler.get_scale(), rows_of(module)["a"]]


def data_parallel(rule: str, patient: bool) -> None:
    """Under DistributedDataParallel, beside a dense layer and against static twins under it."""
    rank, world = dist.get_rank(), dist.get_world_size()

    class Model(torch.nn.Module):
        def __init__(self, embedding: torch.nn.Module) -> None:
            super().__init__()
            self.embedding = embedding
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(ids))

    ours = module_of("embedding", rule, update_in_backward=not patient)
    dense = torch.nn.Embedding.from_pretrained(ours.table.initial_values(IDS), freeze=False)
    models = [torch.nn.parallel.DistributedDataParallel(Model(m)) for m in (ours, dense)]
    make = RULES[rule][1]
    optimizers = [make(model.parameters()) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            rows, _, _, target, lengths = local_batch(step, "u", part_of(step + 1, rank, world))
            losses = []
            for model, optimizer, ids in zip(models, optimizers, (IDS[rows], rows), strict=True):
                optimizer.zero_grad()
                wanted = target[:, :2].repeat_interleave(lengths, 0)
                loss = (model(ids) - wanted).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(
        models[0].module.layer.weight, models[1].module.layer.weight, rtol=2e-5, atol=2e-5
    )


def clipped(divide: int, patient: bool) -> Any:
    """`max_norm` is over the rows of all ranks; `divide` as in `train`."""
    return train("collection", "sgd", 4, divide, max_norm=0.5, update_in_backward=not patient)


def half_precision() -> list[Any]:
    module = embstore.EmbeddingBag(3, dtype="bfloat16", seed=1, sharded=True)
    out = module(IDS.view(8, 3)[dist.get_rank() :])
    out.float().sum().backward()
    whole = module.double()(IDS.view(8, 3))
    whole.sum().backward()
    return [out.dtype, whole.dtype, whole.detach()]


# ---- compilation, copies, dumps


def compiled(fullgraph: bool) -> Any:
    torch._dynamo.reset()
    made = [module_of("bag sum", "sgd") for _ in range(2)]

    class Model(torch.nn.Module):
        def __init__(self, bag: torch.nn.Module) -> None:
            super().__init__()
            self.bag = bag

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return (self.bag(ids * 1, offsets) * 2).sin()

    plain, graph = Model(made[0]), torch.compile(Model(made[1]), backend="aot_eager", fullgraph=fullgraph)
    ids, offsets = IDS[dist.get_rank() :], torch.tensor([0, 3, 3, 9])
    for model in (plain, graph):
        model(ids, offsets).sum().backward()
    for one, two in zip(rows_of(made[0]).values(), rows_of(made[1]).values(), strict=True):
        np.testing.assert_array_equal(one.values, two.values)
    return True


def copies() -> tuple[str, str]:
    module = module_of("embedding", "sgd")
    module(IDS).sum().backward()
    twin = copy.deepcopy(module)
    for one in (module, twin):
        one(IDS[3:]).sum().backward()
    np.testing.assert_array_equal(rows_of(module)["a"].values, rows_of(twin)["a"].values)
    fresh = module_of("embedding", "sgd")
    fresh.load_state_dict(module.state_dict())
    np.testing.assert_array_equal(rows_of(module)["a"].values, rows_of(fresh)["a"].values)
    try:
        pickle.dumps(module)
    except TypeError as error:
        return "TypeError", str(error)
    return "", ""


def save_state(path: str) -> None:
    module = module_of("embedding", "sgd")
    module(IDS).sum().backward()
    torch.save(module.state_dict(), f"{path}/{dist.get_rank()}")


def load_state(path: str) -> None:
    module_of("embedding", "sgd").load_state_dict(torch.load(f"{path}/0", weights_only=True))


def dump(path: str, steps: int) -> Any:
    """Trains, dumps, trains on: the rows at the dump, and what came after it."""
    module = module_of("collection", "adam")
    train_on(module, "collection", steps)
    embstore.dump(f"{path}/dump", {"m": dict(module.tables)}, optim=True)
    log = embstore.IncrementLog.create(f"{path}/log", {"m": dict(module.tables)})
    train_on(module, "collection", 2, first=steps)
    log.append({"m": dict(module.tables)})
    return rows_of(module)


def resume(path: str, steps: int, divide: int) -> Any:
    """What `dump` came to, by the dump and two steps more, and by the log."""
    module, other = module_of("collection", "adam"), module_of("collection", "adam")
    embstore.load(f"{path}/dump", {"m": dict(module.tables)}, optim=True)
    train_on(module, "collection", 2, divide, first=steps)
    embstore.IncrementLog(f"{path}/log").load({"m": dict(other.tables)})
    return rows_of(module), rows_of(other)


def subgroup() -> Any:
    """Two modules over two groups of two ranks; and one of another group under DistributedDataParallel."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = embstore.Embedding(table=embstore.Table(table("a", "sgd")), process_group=groups[rank // 2])
    module(IDS).sum().backward()
    owned = embstore.owner(module.table.rows().keys, 2)
    assert len(owned) and (owned == rank % 2).all()
    try:
        torch.nn.parallel.DistributedDataParallel(module)(IDS)
    except RuntimeError as error:
        return str(error)
    return None


def alone_in_a_group() -> int:
    """A group of one rank keeps all rows, without a message."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    module = embstore.Embedding(3, process_group=groups[dist.get_rank()])
    module(IDS).sum().backward()
    return len(module.table)


def seeds() -> list[int]:
    torch.manual_seed(dist.get_rank())
    return [embstore.Embedding(3, sharded=True).table.seed for _ in range(2)]
