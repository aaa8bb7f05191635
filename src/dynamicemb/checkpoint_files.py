"""Names of the files of layout v2, for programs that read and write dumps themselves.

encode_checkpoint_file_path("dump/model.ebc", "user", 0, 2, "keys")
"dump/model.ebc/user_emb_keys.rank_0.world_size_2"
"""

from __future__ import annotations

import os
import re

_ITEMS = ("keys", "values", "scores", "opt_values")
_COUNTER_ITEMS = ("keys", "frequencies")
_SUFFIXES = {
    "emb_keys": "emb_keys",
    "emb_values": "emb_values",
    "emb_scores": "emb_scores",
    "opt_values": "emb_opt_values",
    "counter_keys": "counter_keys",
    "counter_frequencies": "counter_frequencies",
}


def _encoded(root_path: str, name: str, rank: int, world_size: int) -> str:
    return os.path.join(root_path, f"{name}.rank_{rank}.world_size_{world_size}")


def encode_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """The file of a rank with the keys, values, scores or opt_values of a table."""
    if item not in _ITEMS:
        raise AssertionError(f"item should be one of {_ITEMS} but is: {item!r}")
    return _encoded(root_path, f"{table_name}_emb_{item}", rank, world_size)


def encode_counter_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """The file of a rank with the keys or frequencies of a table's admission counter."""
    if item not in _COUNTER_ITEMS:
        raise AssertionError(f"item should be one of {_COUNTER_ITEMS} but is: {item!r}")
    return _encoded(root_path, f"{table_name}_counter_{item}", rank, world_size)


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """The file with the optimizer arguments and the evict strategy of a table."""
    return os.path.join(root_path, f"{table_name}_opt_args.json")


def find_files(root_path: str, table_name: str, suffix: str) -> tuple[list[str], int]:
    """The files of all ranks, by rank, and how many there are; ([], 0) where there is none.

    suffix  "emb_keys", "emb_values", "emb_scores", "opt_values", "counter_keys" or "counter_frequencies"

    Raises ValueError for another suffix, RuntimeError when a rank is missing or world sizes are mixed.
    """
    if suffix not in _SUFFIXES:
        raise ValueError(f"suffix should be one of {list(_SUFFIXES)} but is: {suffix!r}")
    pattern = re.compile(re.escape(f"{table_name}_{_SUFFIXES[suffix]}") + r"\.rank_(\d+)\.world_size_(\d+)")
    names = os.listdir(root_path) if os.path.isdir(root_path) else []
    matches = [match for match in map(pattern.fullmatch, names) if match]
    if not matches:
        return [], 0
    worlds = {int(match[2]) for match in matches}
    by_rank = {int(match[1]): os.path.join(root_path, match.string) for match in matches}
    world = min(worlds)
    if len(worlds) > 1 or len(matches) != world or sorted(by_rank) != list(range(world)):
        raise RuntimeError(
            f"{root_path}: the {suffix} files of table {table_name!r} should be those of all ranks of one "
            f"world size but are: {sorted(match.string for match in matches)}"
        )
    return [by_rank[rank] for rank in range(world)], world


def get_loading_files(root_path: str, name: str, rank: int, world_size: int) -> tuple[list[str], ...]:
    """What a rank reads of a table: six lists, of keys, values, scores, opt_values, counter keys and counter
    frequencies. Where the dump has `world_size` ranks that is the rank's own file, else every file."""
    lists = []
    for suffix in _SUFFIXES:
        files, world = find_files(root_path, name, suffix)
        lists.append(files[rank : rank + 1] if world == world_size else files)
    return tuple(lists)
