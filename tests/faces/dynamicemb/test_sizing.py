"""Numbers, sizes and file names that clients of the current original package count on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import DataType

from dynamicemb import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
    types,
    utils,
)
from dynamicemb import dynamicemb_config as config_names
from dynamicemb.batched_dynamicemb_tables import (
    encode_checkpoint_file_path,
    encode_counter_checkpoint_file_path,
    encode_meta_json_file_path,
    find_files,
    get_loading_files,
)
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    align_to_table_size,
    complete_initializer_args,
    get_constraint_capacity,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from dynamicemb.optimizer import (
    AdamDynamicEmbeddingOptimizer,
    OptimizerArgs,
    RowWiseAdaGradDynamicEmbeddingOptimizer,
    get_optimizer_ckpt_state_dim,
    get_optimizer_state_dim,
    get_required_arg,
    pad_optimizer_states_from_checkpoint,
    string_to_opt_type,
    truncate_optimizer_states_for_checkpoint,
)
from dynamicemb.planner import DynamicEmbeddingShardingPlanner, DynamicEmbParameterConstraints


def config(rows: int = 1000, dim: int = 8, dtype: DataType = DataType.FP32) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"], data_type=dtype
    )


def test_constants_have_the_values_of_the_original() -> None:
    assert types.DEMB_TABLE_ALIGN_SIZE == types.BUCKET_ALIGNMENT == 16
    assert types.MAX_BUCKET_CAPACITY == 2**63 - 1
    assert (config_names.DEFAULT_BUCKET_CAPACITY, config_names.DynamicEmbKernel) == (128, "DynamicEmb")
    assert config_names.SUPPORTED_DIST_TYPES == ("continuous", "roundrobin", "hash_roundrobin")
    assert {types.KEY_TYPE, types.SCORE_TYPE, types.COUNTER_TYPE} == {torch.int64}
    assert {types.EMBEDDING_TYPE, types.OPT_STATE_TYPE} == {torch.float32}
    assert {m.name: m.value for m in types.CopyMode} == {"EMBEDDING": "embedding", "VALUE": "value"}
    assert {m.name: m.value for m in types.MemoryType} == {
        "DEVICE": "device",
        "MANAGED": "managed",
        "PINNED_HOST": "pinned_host",
        "HOST": "host",
    }
    assert {EmbeddingBagCollection, EmbeddingCollection} == utils.TORCHREC_TYPES
    assert {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2} == utils.DTYPE_NUM_BYTES


@pytest.mark.parametrize(
    ("n", "expected"),
    [(-5, 16), (0, 16), (1, 16), (16, 16), (17, 32), (1023, 1024), (10**12 + 1, 10**12 + 16)],
)
def test_sizes_are_rounded_up_to_the_alignment(n: int, expected: int) -> None:
    assert align_to_table_size(n) == expected
    assert align_to_table_size(97, alignment=10) == 100 and align_to_table_size(0, 7) == 7


@pytest.mark.parametrize(
    ("optimizer", "memory", "dump"),
    [
        (EmbOptimType.ADAM, 14, 14),
        (EmbOptimType.EXACT_ADAGRAD, 7, 7),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 8, 1),
        (EmbOptimType.EXACT_SGD, 0, 0),
        (EmbOptimType.SGD, 0, 0),
        (EmbOptimType.NONE, 0, 0),
    ],
)
def test_an_optimizer_has_a_width_in_memory_and_in_dumps(optimizer: Any, memory: int, dump: int) -> None:
    assert get_optimizer_state_dim(optimizer, 7, torch.float16) == memory
    assert get_optimizer_ckpt_state_dim(optimizer, 7) == dump


def test_a_rowwise_state_needs_the_dtype() -> None:
    assert get_optimizer_state_dim(EmbOptimType.EXACT_ROWWISE_ADAGRAD, 7, torch.float32) == 4
    with pytest.raises(ValueError, match="dtype should be given"):
        get_optimizer_state_dim(EmbOptimType.EXACT_ROWWISE_ADAGRAD, 7)


@pytest.mark.parametrize(
    ("rows", "world", "bucket"), [(1, 1, 128), (1000, 3, 64), (97, 2, MAX_BUCKET_CAPACITY)]
)
def test_the_capacity_of_a_rank_is_that_of_the_plan(rows: int, world: int, bucket: int) -> None:
    options = DynamicEmbTableOptions(bucket_capacity=bucket)
    constraints = {"t": DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)}
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    made = DynamicEmbeddingShardingPlanner([config(rows)], topology, constraints=constraints, debug=False)
    assert get_sharded_table_capacity(config(rows), world, bucket) == made.planned["t"].max_capacity


@pytest.mark.parametrize(
    ("world", "bucket", "name"), [(0, 128, "world_size"), (1, 0, "bucket"), (1, 100, "bucket")]
)
def test_a_capacity_of_nothing_is_refused(world: int, bucket: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* should be"):
        get_sharded_table_capacity(config(), world, bucket)


def test_bytes_of_values_count_vectors_and_states_of_all_ranks() -> None:
    assert get_table_value_bytes(config(1000, 8), EmbOptimType.ADAM, 3) == 512 * 3 * (8 + 16) * 4
    half = config(1000, 8, DataType.FP16)
    assert get_table_value_bytes(half, EmbOptimType.EXACT_ROWWISE_ADAGRAD, 1, 64) == 1024 * (8 + 8) * 2
    assert get_constraint_capacity(100_000, torch.float32, 8, EmbOptimType.ADAM, 128) == 1024


def test_initializer_arguments_are_completed_in_a_copy() -> None:
    args = DynamicEmbInitializerArgs(upper=0.0)
    made = complete_initializer_args(args, embedding_config=config(97))
    assert (made.lower, made.upper) == (-math.sqrt(1 / 97), 0.0) and args.lower is None
    plain = complete_initializer_args(DynamicEmbInitializerArgs())
    assert (plain.lower, plain.upper) == (0.0, 1.0)
    normal = DynamicEmbInitializerArgs(DynamicEmbInitializerMode.NORMAL)
    assert complete_initializer_args(normal) == normal and complete_initializer_args(normal) is not normal


def test_paths_of_dump_files() -> None:
    assert encode_checkpoint_file_path("d", "t", 1, 2, "keys") == "d/t_emb_keys.rank_1.world_size_2"
    assert (
        encode_checkpoint_file_path("d", "t", 0, 1, "opt_values") == "d/t_emb_opt_values.rank_0.world_size_1"
    )
    path = encode_counter_checkpoint_file_path("d", "t", 0, 3, "frequencies")
    assert path == "d/t_counter_frequencies.rank_0.world_size_3"
    assert encode_meta_json_file_path("d", "t") == "d/t_opt_args.json"
    with pytest.raises(AssertionError, match="item should be one of"):
        encode_checkpoint_file_path("d", "t", 0, 1, "frequencies")
    with pytest.raises(AssertionError, match="item should be one of"):
        encode_counter_checkpoint_file_path("d", "t", 0, 1, "values")


def test_files_of_all_ranks_are_found_in_order_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert find_files(root, "t", "emb_keys") == ([], 0)
    paths = [encode_checkpoint_file_path(root, "t", rank, 11, "keys") for rank in range(11)]
    for path in (*paths, encode_checkpoint_file_path(root, "other_t", 0, 1, "keys")):
        Path(path).touch()
    states = [encode_checkpoint_file_path(root, "t", rank, 2, "opt_values") for rank in range(2)]
    for path in states:
        Path(path).touch()
    assert find_files(root, "t", "emb_keys") == (paths, 11)
    assert get_loading_files(root, "t", 1, 2) == (paths, [], [], states[1:], [], [])
    assert get_loading_files(root, "t", 3, 11)[0] == paths[3:4]
    Path(paths[4]).unlink()
    with pytest.raises(RuntimeError, match="all ranks"):
        find_files(root, "t", "emb_keys")
    Path(encode_checkpoint_file_path(root, "t", 4, 12, "keys")).touch()
    with pytest.raises(RuntimeError, match="all ranks"):
        find_files(root, "t", "emb_keys")
    with pytest.raises(ValueError, match="suffix should be one of"):
        find_files(root, "t", "keys")


def test_optimizer_objects_carry_arguments_and_widths() -> None:
    adam = AdamDynamicEmbeddingOptimizer(OptimizerArgs(learning_rate=0.5, beta1=0.8))
    args = adam.get_opt_args()
    assert args["opt_type"] == "adam" and (args["lr"], args["beta1"]) == (0.5, 0.8)
    adam.set_opt_args({**args, "lr": 0.25})
    assert adam.get_opt_args()["lr"] == 0.25 and adam.get_state_dim(5) == 10
    with pytest.raises(ValueError, match="'eps'"):
        adam.set_opt_args({name: value for name, value in args.items() if name != "eps"})
    assert get_required_arg({"a": 1}, "a") == 1
    assert string_to_opt_type("exact_row_wise_adagrad") is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    with pytest.raises(ValueError, match="optimizer_str should be one of"):
        string_to_opt_type("adamm")


def test_rowwise_states_are_cut_for_dumps_and_widened_after() -> None:
    rowwise = RowWiseAdaGradDynamicEmbeddingOptimizer(OptimizerArgs(initial_accumulator_value=0.5))
    memory = torch.arange(12.0).view(3, 4)
    dumped = truncate_optimizer_states_for_checkpoint(rowwise, 7, memory)
    assert dumped.tolist() == [[0.0], [4.0], [8.0]]
    back = pad_optimizer_states_from_checkpoint(rowwise, 7, dumped, 0.5, torch.float32, torch.device("cpu"))
    assert back.tolist() == [[0.0, 0.5, 0.5, 0.5], [4.0, 0.5, 0.5, 0.5], [8.0, 0.5, 0.5, 0.5]]
    with pytest.raises(ValueError, match="opt_states_runtime should have at least 1"):
        truncate_optimizer_states_for_checkpoint(rowwise, 7, memory[:, :0])


def test_a_table_of_text_has_columns_and_tensors_are_compared() -> None:
    text = utils.tabulate([["a", 1], ["long", 22]], ["name", "n"])
    assert text.splitlines() == ["name  n", "========", "a      1", "long  22"]
    two = utils.tabulate([["name", "n"], ["", "rows"], ["a", 1]], sub_headers=True).splitlines()
    assert two == ["name  n", "      rows", "==========", "a        1"]
    utils.assert_tensors_equal(torch.ones(2), torch.ones(2), dtype=torch.float32)
    with pytest.raises(AssertionError):
        utils.assert_tensors_equal(torch.ones(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="dtype should be"):
        utils.assert_tensors_equal(torch.ones(2), torch.ones(2), dtype=torch.float16)
