"""Public names of dynamicemb explain themselves, and their examples run."""

from __future__ import annotations

import docstrings
import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import dynamicemb
import dynamicemb.incremental_dump
import dynamicemb.planner
import dynamicemb.shard
from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions

NAMES = docstrings.public_names(dynamicemb, dynamicemb.planner, dynamicemb.shard, dynamicemb.incremental_dump)


def _model(strategy: DynamicEmbScoreStrategy) -> DistributedModelParallel:
    """What docs/api_dynamicemb.md calls `model`: one dynamic table `user`, trained on ids 5 and 7."""
    config = EmbeddingBagConfig(num_embeddings=1000, embedding_dim=4, name="user", feature_names=["user"])
    model = torch.nn.Module()
    model.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    options = DynamicEmbTableOptions(score_strategy=strategy)
    constraint = dynamicemb.planner.DynamicEmbParameterConstraints(
        use_dynamicemb=True, dynamicemb_options=options
    )
    planner = dynamicemb.planner.DynamicEmbeddingShardingPlanner(
        [config], constraints={"user": constraint}, debug=False
    )
    sharders = [dynamicemb.shard.DynamicEmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    wrapped = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    if strategy is not DynamicEmbScoreStrategy.CUSTOMIZED:
        ids = KeyedJaggedTensor(["user"], torch.tensor([5, 7]), lengths=torch.tensor([2]))
        wrapped.module.ebc(ids).wait().values().sum().backward()
    return wrapped


@pytest.fixture(scope="module")
def models():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {
        "model": _model(DynamicEmbScoreStrategy.STEP),
        "customized_model": _model(DynamicEmbScoreStrategy.CUSTOMIZED),
    }
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_explains_every_argument_and_its_example_runs(name, models):
    docstrings.require_explained(NAMES[name])
    docstrings.require_example(NAMES[name], **models)


def test_the_reference_has_every_public_name():
    docstrings.require_listed("api_dynamicemb.md", NAMES)
