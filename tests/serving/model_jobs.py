"""What ranks do in the tests of serving models. Every function runs on all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed import sharded_jobs
from faces.dynamicemb.models import Spec, collection, jagged, loss_of, outputs, shard, share
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

import embstore
from dynamicemb import DynamicEmbDump
from embstore.serving import serving_model

FEATURES = ("f2", "f0", "f1")  # in another order than that of the tables


class Net(torch.nn.Module):
    def __init__(self, sparse: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.sparse = sparse
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(width, 3)

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        answer = self.sparse(batch)
        if hasattr(answer, "to_dict"):
            return self.dense(answer.values())
        return {name: self.dense(jagged.values()) for name, jagged in answer.items()}


def specs(kind: str, static: bool = False, mean: bool = True) -> list[Spec]:
    dims = (8, 8, 8) if kind == "ec" else (8, 4, 12)
    return [
        Spec("t0", ("f0", "f1"), dims[0], rows=256),
        Spec("t1", ("f1",), dims[1], rows=256, mean=mean and kind == "ebc"),
        Spec("t2", ("f2",), dims[2], rows=256, options=None if static else {}),
    ]


def trained(kind: str, specs: list[Spec], weighted: bool = False) -> Any:
    width = 8 if kind == "ec" else sum(spec.dim * len(spec.features) for spec in specs)
    net = Net(collection(kind, specs, weighted), width)
    model = shard(net, specs, kind)
    for step in range(4):
        answer = model(share(jagged(FEATURES, 12, step, ids=60, weighted=weighted)))
        found = answer if isinstance(answer, dict) else {"": answer}
        sum(v.square().sum() for v in found.values()).backward()
    return model.eval()


def values(answer: Any) -> list[torch.Tensor]:
    found = answer if isinstance(answer, dict) else {"": answer}
    return [v.detach() for v in found.values()]


def dynamicemb_model(path: str, kind: str, weighted: bool, static: bool, bits: bool, mean: bool) -> None:
    model = trained(kind, specs(kind, static, mean), weighted)
    DynamicEmbDump(f"{path}/d", model)
    batches = [jagged(FEATURES, 7, seed, ids=90, weighted=weighted) for seed in range(3)]
    batches.append(jagged(FEATURES, 1, 9, longest=0, weighted=weighted))
    expected = [values(model(batch)) for batch in batches]
    parts = [outputs(model.module.sparse(batch)) for batch in batches]
    names = list(parts[0])
    cache = f"{path}/c{dist.get_rank()}"
    served = serving_model(model, f"{path}/d", cache=cache)
    assert type(served) is Net and served.sparse.__class__.__name__.startswith("Served")
    dist.barrier()
    dist.destroy_process_group()
    for batch, wanted, of_names in zip(batches, expected, parts, strict=True):
        found = outputs(served.sparse(batch))
        assert list(found) == names
        for name in names:
            compare(found[name], of_names[name].detach(), bits)
        for one, two in zip(values(served(batch)), wanted, strict=True):
            compare(one, two, bits)


def compare(ours: torch.Tensor, theirs: torch.Tensor, bits: bool) -> None:
    assert ours.dtype == theirs.dtype
    if bits:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def exported_dynamicemb(path: str, kind: str) -> None:
    model = trained(kind, specs(kind))
    DynamicEmbDump(f"{path}/d", model)
    served = serving_model(model, f"{path}/d", cache=f"{path}/c")
    program = torch.export.export(served, (jagged(FEATURES, 7, 0),))
    assert any("dynamicemb.serve" in str(node.target) for node in program.graph.nodes)
    batch = jagged(FEATURES, 7, 0, ids=90)
    for one, two in zip(values(program.module()(batch)), values(model(batch)), strict=True):
        assert torch.equal(one, two)


def half_and_variable(path: str) -> None:
    """bfloat16 tables, and a batch whose features have different sizes."""
    some = [Spec("t0", ("f0",), 8, dtype=DataType.BF16), Spec("t1", ("f1",), 4)]
    net = collection("ebc", some)
    model = shard(net, some, "ebc")
    loss_of(model(jagged(("f0", "f1"), 5, 0))).backward()
    model.eval()
    DynamicEmbDump(f"{path}/d", model)
    served = serving_model(model, f"{path}/d", cache=f"{path}/c")
    batch = KeyedJaggedTensor(
        ["f0", "f1"],
        torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([1, 1, 2, 1, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f0", "f1"], torch.tensor([[0, 1, 1], [0, 1, 2]])),
    )
    for name, wanted in outputs(model(batch)).items():
        assert torch.equal(outputs(served(batch))[name], wanted)


def sharded_model(path: str) -> None:
    """A native module whose rows are spread over ranks, under DistributedDataParallel."""
    module = sharded_jobs.module_of("collection", "adagrad")
    sharded_jobs.train_on(module, "collection", 3)
    embstore.dump(f"{path}/d", {"m": dict(module.tables)})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse, self.dense = module, torch.nn.Linear(3, 2)

        def forward(self, inputs: Any) -> torch.Tensor:
            return self.dense(self.sparse(inputs)["u"])

    model = torch.nn.parallel.DistributedDataParallel(Model()).eval()
    inputs = {"u": sharded_jobs.IDS, "v": sharded_jobs.IDS[:4]}
    wanted = model(inputs)
    served = serving_model(model, f"{path}/d", cache=f"{path}/c{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()
    assert type(served) is Model and torch.equal(served(inputs), wanted)


def sharded_with_shared_rows(path: str) -> None:
    """Each rank has shared rows of its own for the ids that it owns."""
    module = embstore.Embedding(4, name="t", max_capacity=128, seed=1, sharded=True)
    for step in range(3):
        module(torch.arange(300) * 31 + step + dist.get_rank()).square().sum().backward()
    embstore.dump(f"{path}/d", {"m": dict(module.tables)})
    ids = torch.arange(2000)
    wanted = module.eval()(ids)
    served = serving_model(module, f"{path}/d", cache=f"{path}/c{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()
    assert torch.equal(served(ids), wanted) and wanted.any(1).all()
