"""What the ranks of the tests do. Every function runs on each rank and returns something small."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from faces.dynamicemb.models import (
    Spec,
    collection,
    dmp,
    jagged,
    loss_of,
    outputs,
    part,
    rows,
    shard,
    share,
    tables,
)
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import CommOp

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    exchange,
)
from dynamicemb.discovery import find_collections
from dynamicemb.scores import get_score

UNIFORM = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.UNIFORM, lower=-1.0, upper=1.0)
EXTREME = [
    *(0, 1, -1, -2, -3, -4, 2**63 - 1, -(2**63), -(2**63) + 1, 2**32, 2**33, 2**62, -(2**62), 3, 6, 9),
    *(5 + (high << 48) for high in range(8)),  # differ in high bits only
]


def _features(specs: Sequence[Spec]) -> list[str]:
    return list(dict.fromkeys(feature for spec in specs for feature in spec.features))


def train(
    kind: str,
    specs: Sequence[Spec],
    fused_params: Mapping[str, Any] | None = None,
    *,
    dedup: bool = False,
    weighted: bool = False,
    steps: int = 10,
    samples: int = 12,
    longest: int = 4,
    extreme: bool = False,
) -> dict[str, Any]:
    """Trains on the same global batches whatever the number of ranks; returns outputs and rows.

    extreme: ids are replaced by keys at the ends and in the corners of int64.
    """
    model = dmp(kind, specs, fused_params, dedup=dedup, weighted=weighted)
    features, answers = _features(specs), []
    for step in range(steps):
        batch = jagged(features, samples, step, longest=longest, weighted=weighted)
        if extreme:
            batch = KeyedJaggedTensor(
                features, torch.tensor(EXTREME)[batch.values() % len(EXTREME)], lengths=batch.lengths()
            )
        answer = model(share(batch))
        answers.append({name: v.detach().clone() for name, v in outputs(answer).items()})
        # the mean over ranks that TorchRec takes of sharded gradients becomes a sum again
        (loss_of(answer) * dist.get_world_size()).backward()
    return {"answers": answers, "rows": rows(model), "static": static_rows(model)}


def static_rows(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of static tables on this rank, with their first row."""
    found = {}
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for piece in value.local_shards():
                found[key.split(".")[-2]] = (piece.metadata.shard_offsets[0], piece.tensor.detach().clone())
    return found


def bags(keys: Sequence[int], features: Sequence[str] = ("f0",)) -> KeyedJaggedTensor:
    """One id a sample, the same for every feature."""
    values = torch.tensor(list(keys) * len(features), dtype=torch.int64)
    return KeyedJaggedTensor(list(features), values, lengths=torch.ones(len(values), dtype=torch.int64))


def evaluate_after_training() -> dict[str, Any]:
    model = dmp("ebc", [Spec("t0", ("f0",), options={"score_strategy": DynamicEmbScoreStrategy.STEP})])
    loss_of(model(bags([2, 3]))).backward()
    before = {name: (t.rows(), t.stats(), t.score) for name, t in tables(model).items()}
    model.eval()
    answer = outputs(model(bags([2, 3, 1000])))["f0"].detach()
    after = {name: (t.rows(), t.stats(), t.score) for name, t in tables(model).items()}
    same = all(
        (a[0].keys == b[0].keys).all() and (a[0].scores == b[0].scores).all() and a[1:] == b[1:]
        for a, b in zip(before.values(), after.values(), strict=True)
    )
    model.train()
    model(bags([1000]))
    return {"answer": answer, "same": same, "stored": sorted(rows(model)["t0"])}


def shown(kind: str) -> dict[str, str]:
    model = dmp(kind, [Spec("t0", ("f0",)), Spec("t1", ("f1",), options=None, sharding="table_wise")])
    empty = repr(model)
    loss_of(
        model(KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([2, 1]), torch.tensor([1, 1])))
    ).backward()
    (sharded,) = (m for m in model.modules() if hasattr(m, "dynamic_tables"))
    return {
        "empty": empty,
        "trained": repr(model),
        "html": sharded._repr_html_(),
        "names": str(list(model.state_dict())),
    }


def schedule() -> dict[str, Any]:
    """Learning rates through a torch scheduler on the optimizer that DMP shows, and its state."""
    model = dmp("ec", [Spec("t0", ("f0",))], {"learning_rate": 0.5})
    scheduler = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, step_size=1, gamma=0.1)
    moves = []
    for _ in range(2):
        before = outputs(model(bags([4])))["f0"].detach().clone()
        outputs(model(bags([4])))["f0"].sum().backward()
        moves.append((before - outputs(model(bags([4])))["f0"].detach()).flatten()[0].item())
        model.fused_optimizer.step()
        scheduler.step()
    state = model.fused_optimizer.state_dict()
    model.fused_optimizer.load_state_dict(state)
    return {"moves": moves, "keys": list(model.fused_optimizer.params), "state": state}


def optimizer_in_backward() -> dict[str, Any]:
    specs = [Spec("t0", ("f0",)), Spec("t1", ("f1",))]
    module = collection("ec", specs)
    apply_optimizer_in_backward(torch.optim.SGD, module.embeddings["t0"].parameters(), {"lr": 0.25})
    apply_optimizer_in_backward(torch.optim.Adam, module.embeddings["t1"].parameters(), {"lr": 0.125})
    model = shard(module, specs, "ec", fused_params={})
    return {
        name: t.optimizer_args() for c in find_collections(model).values() for name, t in c.tables.items()
    }


def fused_params_of(params: Mapping[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dmp("ebc", [Spec("t0", ("f0",))], params)
    return [str(w.message) for w in caught if "dynamic table" in str(w.message)]


def state_dict_round_trip(kind: str) -> dict[str, Any]:
    specs = [Spec("dynamic", ("f0",)), Spec("static", ("f1",), options=None)]
    model = dmp(kind, specs)
    loss_of(model(jagged(["f0", "f1"], 5, 1))).backward()
    state, stored = model.state_dict(), rows(model)
    other = dmp(kind, specs)
    other.load_state_dict(state)
    (mine,), (theirs,) = static_rows(model).values(), static_rows(other).values()
    return {
        "keys": sorted(state),
        "static": torch.equal(mine[1], theirs[1]),
        "kept": rows(model) == stored,
        "parameters": [name for name, _ in model.named_parameters()],
    }


def pipeline(dedup: bool) -> dict[str, Any]:
    """The same batches through TrainPipelineSparseDist and through plain calls."""

    class Model(torch.nn.Module):
        def __init__(self, sparse: torch.nn.Module) -> None:
            super().__init__()
            self.sparse = sparse

        def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            answer = self.sparse(batch)
            loss = torch.sin(answer["f0"].values()).sum() + 3 * torch.cos(answer["f1"].values()).sum()
            return loss, loss.detach()

    specs = [Spec("t0", ("f0",)), Spec("t1", ("f1",))]
    trained = []
    for piped in (False, True):
        model = shard(Model(collection("ec", specs)), specs, "ec", dedup=dedup)
        batches = [share(jagged(["f0", "f1"], 8, step)) for step in range(5)]
        if piped:
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
            pipe = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            iterator = iter(batches)
            for _ in batches:
                pipe.progress(iterator)
        else:
            for batch in batches:
                model(batch)[0].backward()
        trained.append(rows(model))
    return {"same": trained[0] == trained[1], "size": len(trained[0]["t0"])}


def uneven(kind: str, dedup: bool = False, sharding: str = "row_wise") -> dict[str, Any]:
    """Rank r has r * 3 samples, so rank 0 has none; one feature is empty everywhere."""
    specs = [Spec("t0", ("f0", "f1"), sharding=sharding), Spec("t1", ("f2",), sharding=sharding)]
    model = dmp(kind, specs, dedup=dedup)
    batch = jagged(["f0", "f1", "f2"], 6, 3)
    lengths = batch.lengths().view(3, 6).clone()
    keep = torch.repeat_interleave(torch.tensor([1, 0, 1]).repeat_interleave(6), batch.lengths()).bool()
    lengths[1] = 0
    batch = KeyedJaggedTensor(batch.keys(), batch.values()[keep], lengths=lengths.reshape(-1))
    world, rank = dist.get_world_size(), dist.get_rank()
    begin = sum(range(rank)) * 6 // sum(range(world)) if world > 1 else 0
    end = sum(range(rank + 1)) * 6 // sum(range(world)) if world > 1 else 6
    answer = model(part(batch, begin, end))
    (loss_of(answer) * world).backward()
    return {"rows": rows(model), "shapes": [tuple(v.shape) for v in outputs(answer).values()]}


def uneven_with_static() -> dict[str, Any]:
    """As `uneven`, with a row-wise static table beside: TorchRec pools it by a reduce-scatter."""
    specs = [Spec("t0", ("f0",)), Spec("t1", ("f1",), rows=64, options=None)]
    model = dmp("ebc", specs)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        batch = jagged(["f0", "f1"], 13, step)
        cuts = [0, 5, 13] if world == 2 else [0, 13]
        answer = model(part(batch, cuts[rank], cuts[rank + 1]))
        assert answer.values().shape[0] == cuts[rank + 1] - cuts[rank]
        (loss_of(answer) * world).backward()
    return {"rows": rows(model), "static": static_rows(model)}


def several_collections() -> dict[str, Any]:
    """Two collections with tables of the same dtype and of others, in a module of modules."""
    bag_specs = [Spec("a", ("f0",), dim=4), Spec("b", ("f0", "f1"), dim=12, mean=True)]
    key_specs = [Spec("c", ("f2",)), Spec("d", ("f2",))]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = collection("ebc", bag_specs)
            self.inner = torch.nn.ModuleList([collection("ec", key_specs)])

        def forward(self, batch: KeyedJaggedTensor) -> tuple[Any, Any]:
            return self.bags(batch), self.inner[0](batch)

    from faces.dynamicemb.models import sharders, topology

    from dynamicemb.planner import DynamicEmbeddingShardingPlanner

    model = Model()
    specs = [*bag_specs, *key_specs]
    planner = DynamicEmbeddingShardingPlanner(
        [*(s.config("ebc") for s in bag_specs), *(s.config("ec") for s in key_specs)],
        topology=topology(),
        constraints={spec.name: spec.constraint() for spec in specs},
        debug=False,
    )
    from torchrec.distributed.model_parallel import DistributedModelParallel

    plan = planner.collective_plan(model, sharders(), dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders())
    pooled, single = sharded(jagged(["f0", "f1", "f2"], 6, 1))
    (loss_of(pooled) + loss_of(single)).backward()
    return {
        "paths": {path: list(c.tables) for path, c in find_collections(sharded).items()},
        "pooled": {name: tuple(v.shape) for name, v in outputs(pooled).items()},
        "single": sorted(outputs(single)),
        "scores": get_score(sharded),
    }


def half_tables(output_dtype: Any) -> dict[str, Any]:
    from torchrec.modules.embedding_configs import DataType

    params = (
        {"learning_rate": 0.5}
        if output_dtype is None
        else {"learning_rate": 0.5, "output_dtype": output_dtype}
    )
    model = dmp(
        "ebc", [Spec("t0", ("f0",), dtype=DataType.FP16), Spec("t1", ("f1",), dtype=DataType.BF16)], params
    )
    answer = outputs(model(jagged(["f0", "f1"], 6, 1)))
    sum(v.float().sum() for v in answer.values()).backward()
    return {
        "dtype": {v.dtype for v in answer.values()},
        "tables": [t.options.dtype.name for t in tables(model).values()],
    }


def bad_input_on_rank_one(kind: str) -> None:
    model = dmp(kind, [Spec("t0", ("f0",))])
    batch = bags([1, 2])
    if dist.get_rank() == 1:
        batch = KeyedJaggedTensor(["f0"], torch.rand(2), lengths=torch.ones(2, dtype=torch.int64))
    model(batch)


def disagree(about: str) -> None:
    rank = dist.get_rank()
    options = {"max_load_factor": 0.5 + 0.1 * rank} if about == "options" else {}
    params = {"learning_rate": 0.1 * (1 + rank)} if about == "optimizer" else None
    dmp("ebc", [Spec("t0", ("f0",), rows=64 << rank if about == "rows" else 64, options=options)], params)


def variable_batch(dynamic: bool, weighted: bool) -> dict[str, Any]:
    """Three steps with batches whose features have different sizes, and the rows or weights after them."""
    names = ("t0", "t1")
    specs = [Spec(n, (f"f{i}",), options={} if dynamic else None) for i, n in enumerate(names)]
    model = dmp("ebc", specs, weighted=weighted)
    answers = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.tensor([2, 0, 3, 1])  # three bags of f0, one of f1
        batch = KeyedJaggedTensor(
            ["f0", "f1"],
            torch.randint(0, 20, (6,), generator=generator),
            weights=torch.rand(6, generator=generator) if weighted else None,
            lengths=lengths,
            stride_per_key_per_rank=[[3], [1]],
            inverse_indices=(["f0", "f1"], torch.tensor([[0, 1, 2, 2, 0], [0, 0, 0, 0, 0]])),
        )
        answer = model(batch)
        loss_of(answer).backward()
        answers.append({name: vectors.detach() for name, vectors in outputs(answer).items()})
    return {"answers": answers, "rows": rows(model)}


def variable_batch_without_inverse() -> None:
    batch = KeyedJaggedTensor(
        ["f0", "f1"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    dmp("ebc", [Spec("t0", ("f0",)), Spec("t1", ("f1",))])(batch).values()


def any_id(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Ids far beyond num_embeddings and, as int64, negative ones; what is logged and warned meanwhile."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener, level = Listener(logging.WARNING), logging.root.manager.disable
    logger = logging.getLogger("torchrec.sparse.jagged_tensor_validator")
    logging.disable(logging.NOTSET)
    logger.addHandler(listener)
    try:
        options = {"index_type": dtype}
        model = dmp(kind, [Spec("t0", ("f0",), options=options), Spec("t1", ("f1",), options=options)])
        values = torch.tensor([5, -1, -(2**63), 1 << 62, 7, 7]).view(dtype)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            batch = KeyedJaggedTensor(["f0", "f1"], values, lengths=torch.tensor([2, 1, 0, 3]))
            answer = model(batch)
            loss_of(answer).backward()
    finally:
        logger.removeHandler(listener)
        logging.disable(level)
    return {
        "heard": heard + [str(w.message) for w in warned],
        "answer": {name: v.detach() for name, v in outputs(answer).items()},
        "keys": {name: t.rows().keys.tolist() for name, t in tables(model).items()},
    }


def quantized(
    kind: str, sharding: str, forward: Any, backward: Any, refused_on: int | None = None
) -> dict[str, Any]:
    """A step with codecs of these types: vectors before it and rows after it."""
    precision = {
        "forward_precision": forward or CommType.FP32,
        "backward_precision": backward or CommType.FP32,
    }
    if refused_on == dist.get_rank():
        precision["forward_precision"] = CommType.INT8
    codecs = get_qcomm_codecs(QCommsConfig(**precision))
    specs = [
        Spec(f"t{i}", (f"f{i}",), sharding=sharding, options={"initializer_args": UNIFORM}) for i in range(3)
    ]
    model = dmp(kind, specs, codecs={operation.name: codecs for operation in CommOp})
    answer = model(share(jagged(["f0", "f1", "f2"], 12, 7)))
    answers = {name: v.detach().clone() for name, v in outputs(answer).items()}
    loss_of(answer).backward()
    return {"answers": answers, "rows": rows(model)}


def forward_without_waiting(kind: str) -> dict[str, int]:
    model = dmp(kind, [Spec("t0", ("f0",), dim=8)])
    received = []
    blocks = exchange.Sent.blocks

    def counted(sent: Any) -> Any:
        received.append(1)
        return blocks(sent)

    exchange.Sent.blocks = counted  # type: ignore[method-assign]
    try:
        answer = model(bags([1, 2, 3]))
        before = len(received)
        loss_of(answer).backward()
    finally:
        exchange.Sent.blocks = blocks  # type: ignore[method-assign]
    return {"received_in_forward": before, "received": len(received)}
