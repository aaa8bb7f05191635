"""Every public name of the four originals, and what becomes of it here: the one list behind
docs/compatibility.md and the tests that walk it.

    Module("dynamicemb.utils", "TORCHREC_TYPES tabulate")             these names are supported
    differs={"get_planner": "..."}                                    supported, with this difference
    missing={"StorageLayout": Absence(RAISES, "...")}                 not supported, and how that shows

A name may have a member: "DynamicVariable.size".
"""

# ruff: noqa: E501  (cells of a table)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ABSENT = "absent"  # importing it fails
RAISES = "raises"  # it imports, so that a block of imports passes; using it raises NotImplementedError


@dataclass(frozen=True)
class Absence:
    """A name that is not supported: how that shows, and why."""

    shows: str
    why: str


@dataclass(frozen=True)
class Module:
    """The names of one module: those that work as they did, with a difference, or not."""

    path: str
    same: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, Absence] = field(default_factory=dict)

    @property
    def supported(self) -> list[str]:
        return [*self.same.split(), *self.differs]


@dataclass(frozen=True)
class Original:
    """A package that is replaced. `packages` are what its modules need here."""

    title: str
    version: str
    guide: str
    packages: tuple[str, ...]
    modules: tuple[Module, ...]


_ENUMS = """DynamicEmbCheckMode DynamicEmbInitializerArgs DynamicEmbInitializerMode DynamicEmbPoolingMode
    DynamicEmbScoreStrategy"""
_SIZES = "BUCKET_ALIGNMENT DEMB_TABLE_ALIGN_SIZE"
_OPTIONS = {
    "DynamicEmbTableOptions": "fields of older versions stay; what concerns a GPU has no effect; objects are not "
    "changed by the planner",
    "DynamicEmbEvictStrategy": "EPOCH_LRU and EPOCH_LFU are names only; LFU goes with every score strategy",
    "MAX_BUCKET_CAPACITY": "up to 16,384 rows a rank",
}
_CAPACITIES = {
    "get_sharded_table_capacity": "what our planner gives: a power of two, at least a bucket",
}
_PLANNER = {
    "DynamicEmbeddingShardingPlanner": "completes copies of the options, not the user's objects",
}
_COUNTER = {"KVCounter": "counts exactly; `bucket_capacity` has no effect"}
_OWN_STORAGE = Absence(RAISES, "tables keep their own rows; use BatchedDynamicEmbeddingTablesV2")
_INTERNAL = Absence(ABSENT, "internal to the original; no known client")

DYNAMICEMB = Original(
    "NVIDIA DynamicEmb (`dynamicemb`)",
    "recsys-examples 43465ae (2026-07-23, dynamicemb 0.1.0); documents of 2025-05",
    "dynamicemb.md",
    ("torchrec",),
    (
        Module(
            "dynamicemb",
            f"""{_ENUMS} {_SIZES} align_to_table_size get_table_value_bytes AdmissionStrategy Counter ScoreStrategy
            FrequencyAdmissionStrategy BATCH_SIZE_PER_DUMP EmbOptimType OptimizerArgs data_type_to_dtype
            data_type_to_dyn_emb dyn_emb_to_torch string_to_evict_strategy torch_to_dyn_emb BATCH_SIZE
            DEFAULT_INDEX_TYPE HKVConfig""",
            {
                **_OPTIONS,
                **_CAPACITIES,
                **_COUNTER,
                "DynamicEmbDump": "atomic; layout v1a of the documents, or v2 where `counter` is given or "
                "DYNAMICEMB_LAYOUT says so; `async_` and `layout` are new",
                "DynamicEmbLoad": "reads every layout; another optimizer or score strategy loads rows with fresh "
                "states or scores and a warning; a table without files warns",
            },
        ),
        Module(
            "dynamicemb.dynamicemb_config",
            f"""{_ENUMS} align_to_table_size get_table_value_bytes DynamicEmbKernel DEFAULT_INDEX_TYPE
            DEFAULT_BUCKET_CAPACITY BATCH_SIZE_PER_DUMP SUPPORTED_DIST_TYPES DEBUG_EMB_INITIALIZER_MOD
            SUPPORTED_COMPOUND_SCORE_STRATEGIES ScoreStrategy normalize_score_strategy validate_score_strategy
            get_eviction_score_strategy score_strategy_has_timestamp_column get_physical_score_order
            score_dump_permutation score_load_permutation warning_for_cstm_score dtype_to_bytes
            complete_initializer_args get_constraint_capacity data_type_to_dtype data_type_to_dyn_emb
            string_to_evict_strategy""",
            {
                "DynamicEmbTableOptions": _OPTIONS["DynamicEmbTableOptions"],
                "DynamicEmbEvictStrategy": _OPTIONS["DynamicEmbEvictStrategy"],
                **_CAPACITIES,
            },
        ),
        Module(
            "dynamicemb.types",
            f"""{_SIZES} MemoryType DynamicEmbInitializerMode DynamicEmbInitializerArgs CopyMode Cache Counter
            AdmissionStrategy KEY_TYPE EMBEDDING_TYPE SCORE_TYPE OPT_STATE_TYPE COUNTER_TYPE
            torch_dtype_to_np_dtype""",
            {
                "MAX_BUCKET_CAPACITY": _OPTIONS["MAX_BUCKET_CAPACITY"],
                "Storage": "as `external_storage`: rows come and go by find, insert and export_keys_values on CPU "
                "tensors; its dump and load are not called",
            },
        ),
        Module(
            "dynamicemb.utils",
            "TORCHREC_TYPES DTYPE_NUM_BYTES torch_to_dyn_emb tabulate assert_tensors_equal",
        ),
        Module(
            "dynamicemb.embedding_admission", "MultiTableKVCounter FrequencyAdmissionStrategy", dict(_COUNTER)
        ),
        Module(
            "dynamicemb.optimizer",
            """EmbOptimType OptimizerArgs get_optimizer_state_dim get_optimizer_ckpt_state_dim string_to_opt_type
            get_required_arg truncate_optimizer_states_for_checkpoint pad_optimizer_states_from_checkpoint""",
            dict.fromkeys(
                (
                    "BaseDynamicEmbeddingOptimizer",
                    "SGDDynamicEmbeddingOptimizer",
                    "AdamDynamicEmbeddingOptimizer",
                    "AdaGradDynamicEmbeddingOptimizer",
                    "RowWiseAdaGradDynamicEmbeddingOptimizer",
                ),
                "arguments and sizes only: the table updates its rows",
            ),
        ),
        Module(
            "dynamicemb.initializer",
            "create_initializer_from_args BaseDynamicEmbInitializer",
            dict.fromkeys(
                (
                    "NormalInitializer",
                    "TruncatedNormalInitializer",
                    "UniformInitializer",
                    "ConstantInitializer",
                    "DebugInitializer",
                ),
                "fills tensors; the rows of a table are a function of seed, table and key",
            ),
        ),
        Module(
            "dynamicemb.get_planner",
            differs={"get_planner": "on the CPU every static kernel is `fused`, and HBM is 0"},
        ),
        Module(
            "dynamicemb.planner",
            "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator",
            dict(_PLANNER),
        ),
        Module("dynamicemb.planner.planner", differs=dict(_PLANNER)),
        Module("dynamicemb.planner.enumerators", "DynamicEmbeddingEnumerator"),
        Module("dynamicemb.planner.rw_sharding", "DynamicEmbParameterSharding"),
        Module(
            "dynamicemb.shard",
            "DynamicEmbeddingCollectionSharder ShardedDynamicEmbeddingCollection",
            {"DynamicEmbeddingBagCollectionSharder": "offers row_wise static tables on the CPU too"},
        ),
        Module(
            "dynamicemb.shard.embedding",
            "ShardedDynamicEmbeddingCollection DynamicEmbeddingCollectionSharder",
            {"DynamicEmbeddingCollectionContext": "`frequency_counters` is kept for clients and not filled"},
        ),
        Module("dynamicemb.shard.embeddingbag", "DynamicEmbeddingBagCollectionSharder"),
        Module(
            "dynamicemb.dump_load",
            "find_sharded_modules check_emb_collection_modules DynamicEmbDump DynamicEmbLoad",
            {
                "get_dynamic_emb_module": "a view for each collection; it has the members of V2 without forward"
            },
        ),
        Module(
            "dynamicemb.incremental_dump",
            "set_score",
            {
                "incremental_dump": "rows of all ranks, sorted by key, also with pg=None",
                "get_score": "NO_EVICTION gives the time, as its rows have timestamps; tables keep scores of their "
                "own",
            },
        ),
        Module(
            "dynamicemb.batched_dynamicemb_tables",
            """encode_checkpoint_file_path encode_meta_json_file_path encode_counter_checkpoint_file_path find_files
            get_loading_files BatchedDynamicEmbeddingTablesV2.get_score
            BatchedDynamicEmbeddingTablesV2.set_score BatchedDynamicEmbeddingTablesV2.set_learning_rate
            BatchedDynamicEmbeddingTablesV2.table_names BatchedDynamicEmbeddingTablesV2.optimizer
            BatchedDynamicEmbeddingTablesV2.tables BatchedDynamicEmbeddingTablesV2.enable_prefetch
            BatchedDynamicEmbeddingTablesV2.set_record_cache_metrics
            BatchedDynamicEmbeddingTablesV2.split_embedding_weights BatchedDynamicEmbeddingTablesV2.flush""",
            {
                "BatchedDynamicEmbeddingTables": "the older class stays, with its order of arguments",
                "BatchedDynamicEmbeddingTablesV2": "pooled per_sample_weights are weights of bags; without pooling "
                "they are counts. weight_decay_mode, max_norm, eta, momentum and regularizations other than the "
                "defaults raise",
                "BatchedDynamicEmbeddingTablesV2.dump": "the folder has to be new or empty; published by rename",
                "BatchedDynamicEmbeddingTablesV2.load": "also reads the folder of a collection in a whole dump",
                "BatchedDynamicEmbeddingTablesV2.export_keys_values": "an empty table is [0, dim]",
                "BatchedDynamicEmbeddingTablesV2.fill_tables": "keys get their initial vectors",
                "BatchedDynamicEmbeddingTablesV2.incremental_dump": "all ranks",
                "BatchedDynamicEmbeddingTablesV2.prefetch": "a forward of another batch than the oldest raises",
                "BatchedDynamicEmbeddingTablesV2.cache": "a view of the memory over a store; None without one",
                "BatchedDynamicEmbeddingTablesV2.reset_cache_states": "writes rows down and keeps them in memory",
            },
            {"StorageLayout": Absence(RAISES, "rows live in host memory, or below it in `external_storage`")},
        ),
        Module(
            "dynamicemb.key_value_table",
            "Storage Cache CopyMode load_from_json save_to_json",
            missing={
                "DynamicEmbStorage": _OWN_STORAGE,
                "DynamicEmbCache": _OWN_STORAGE,
                "HybridStorage": _OWN_STORAGE,
                "flush_cache": Absence(RAISES, "call flush() of the module"),
                "eval_lookup": Absence(RAISES, "call the module after eval()"),
            },
        ),
        Module(
            "dynamicemb.exportable_tables",
            "create_inference_embedding_collection apply_inference_embedding_collection",
            {"InferenceEmbeddingCollection": "runs eagerly on the CPU; torch.export raises"},
        ),
        Module(
            "dynamicemb.lookup_meta",
            "register_lookup_fake",
            {"REGISTERED": "always False: there are no such operators here"},
        ),
        Module(
            "dynamicemb.index_range_meta",
            "register_index_range_fake",
            {"REGISTERED": "always False: there are no such operators here"},
        ),
        *(
            Module(path, missing={"": _INTERNAL})
            for path in (
                "dynamicemb.scored_hashtable",
                "dynamicemb.batched_dynamicemb_function",
                "dynamicemb.batched_dynamicemb_compute_kernel",
                "dynamicemb.input_dist",
                "dynamicemb.extendable_tensor",
                "dynamicemb.construct_twin_module",
                "dynamicemb_extensions",
            )
        ),
    ),
)

_COLLECTIVE = Absence(ABSENT, "internal to the original: ranks exchange ids in another way here")

TDE = Original(
    "TorchRec dynamic embedding (`torchrec_dynamic_embedding`)",
    "TorchRec contrib/dynamic_embedding of 2023-04",
    "torchrec_dynamic_embedding.md",
    ("torchrec",),
    (
        Module(
            "torchrec_dynamic_embedding",
            differs={
                "wrap": "returns the loader, as the document says; return_module=True returns the pair of the "
                "original's code. Exact for any num_prefetch; every batch is delivered",
                "save": "waits for batches in flight",
            },
        ),
        Module(
            "torchrec_dynamic_embedding.dataloader",
            "wrap save DataLoader DataLoaderIter",
            missing={"transform_loop": Absence(ABSENT, "internal: the loader has threads of its own")},
        ),
        Module("torchrec_dynamic_embedding.id_transformer_group", "IDTransformerGroup"),
        Module("torchrec_dynamic_embedding.id_transformer_collection", "IDTransformerCollection"),
        Module(
            "torchrec_dynamic_embedding.id_transformer",
            "TensorList",
            {"IDTransformer": "`naive` and `cacheline` both mean the engine's index"},
        ),
        Module("torchrec_dynamic_embedding.ps", "PS PSCollection DEFAULT_PS_CHUNK_SIZE"),
        Module("torchrec_dynamic_embedding.tensor_list", "TensorList"),
        Module(
            "torchrec_dynamic_embedding.distributed",
            missing=dict.fromkeys(
                (
                    "gather_global_ids",
                    "scatter_cache_ids",
                    "broadcast_transform_result",
                    "broadcast_ids_to_evict",
                ),
                _COLLECTIVE,
            ),
        ),
        Module("torchrec_dynamic_embedding.utils", missing={"": Absence(ABSENT, "internal to the original")}),
        Module(
            "torch.ops.tde", differs={"register_io": "a plug-in may also take over memory, ssd or redis URLs"}
        ),
        Module(
            "torch.classes.tde",
            missing=dict.fromkeys(
                ("TransformResult", "TensorList", "IDTransformer", "LocalShardList", "FetchHandle", "PS"),
                Absence(ABSENT, "classes of the original's C++ library"),
            ),
        ),
    ),
)

ONE_EMBEDDING = Original(
    "OneFlow OneEmbedding (`one_embedding`)",
    "oneflow.one_embedding of OneFlow 0.9; Oneflow-Inc/models of 2022",
    "one_embedding.md",
    ("torch",),
    (
        Module(
            "one_embedding",
            """make_table_options make_table make_column_options make_uniform_initializer make_normal_initializer
            make_constant_initializer make_trunc_normal_initializer make_persistent_table_writer
            MultiTableEmbedding.save_snapshot MultiTableEmbedding.load_snapshot MultiTableEmbedding.forward""",
            {
                "make_device_mem_store_options": "device memory is host memory",
                "make_cached_host_mem_store_options": "as device_mem on the CPU",
                "make_cached_ssd_store_options": "both budgets together are the cache in memory; `capacity` is a "
                "hint",
                "make_persistent_table_reader": "takes no lock, so it reads beside training; dtypes of torch, numpy "
                "or by name",
                "MultiTableEmbedding": "torch modules, dtypes and optimizers in place of OneFlow's; ids of any value",
                "MultiTableMultiColumnEmbedding": "torch modules, dtypes and optimizers in place of OneFlow's",
                "Optimizer": "optional: torch.optim over parameters() trains the rows",
                "Ftrl": "by the original's formula; the docstring says where it differs from the paper",
                "SmartDecayAdam": "works eagerly, not in graphs alone",
            },
        ),
    ),
)

_SOK_NAMES = """Variable DistributedVariable LocalizedVariable assign export SGD lookup_sparse
    all2all_dense_embedding filter_variables"""
_SOK_DIFFERS = {
    "init": 'without arguments: horovod, torch.distributed or one process, whichever is there; comm_tool "torch" '
    'and "single" are new',
    "set_comm_tool": "also torch and single",
    "OptimizerWrapper": "Keras 3, Keras 2 and tf.compat.v1 optimizers; LossScaleOptimizer is refused",
    "dump": "atomic, with checksums; files are those of the original",
    "load": "any number of ranks loads into any other",
}
_RAW_OPS = {"raw_ops": "importable; each attribute raises NotImplementedError that names the public call"}

SOK = Original(
    "HugeCTR SparseOperationKit (`sparse_operation_kit`)",
    "HugeCTR 2f2016f (2025-09-15, SOK 2.1.0); `experiment` as of 2023-12",
    "sparse_operation_kit.md",
    ("tensorflow",),
    (
        Module(
            "sparse_operation_kit",
            f"""{_SOK_NAMES} tf_version __version__ incremental_model_dump sparse_read_and_evict
            trainable_variables OptimizerWrapper.lr""",
            {
                **_SOK_DIFFERS,
                **_RAW_OPS,
                "DynamicVariable": "rows in host memory for every var_type; capacities that are no powers of two are "
                "rounded up with a warning",
            },
        ),
        Module(
            "sparse_operation_kit.experiment",
            f"{_SOK_NAMES} communication distributed_variable dynamic_variable lookup optimizer dump_load utils",
            {**_SOK_DIFFERS, **_RAW_OPS, "DynamicVariable": 'var_type is "hbm" unless said otherwise'},
        ),
        Module(
            "sparse_operation_kit.communication",
            "rank num_ranks local_rank num_gpu_per_rank global_gpu_id num_gpus alltoall allreduce allgather broadcast",
            {"id_in_rank": "0: a rank is one device"},
        ),
    ),
)

ORIGINALS = (DYNAMICEMB, TDE, ONE_EMBEDDING, SOK)
