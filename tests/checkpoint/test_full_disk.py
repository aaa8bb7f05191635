"""Targets that cannot take a dump: the error says why, and old data stays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint.tables import files_in, make, require_same

import embstore


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mount.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mount.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def filled(rows: int) -> embstore.Table:
    table = make(dim=16, optimizer=embstore.SGD())
    table.insert_or_assign(np.arange(rows), np.ones((rows, 16)))
    return table


def test_a_full_disk_raises_and_keeps_the_old_dump(small_disk: Path) -> None:
    small, large = filled(1000), filled(50_000)
    embstore.dump(small_disk / "d", {"model": {"user": small}})
    before = files_in(small_disk)
    for overwrite in (False, True):
        path = small_disk / ("d" if overwrite else "e")
        with pytest.raises(OSError, match="No space left on device"):
            embstore.dump(path, {"model": {"user": large}}, overwrite=overwrite)
        assert files_in(small_disk) == before, "nothing is left behind"
    handle = embstore.dump(small_disk / "e", {"model": {"user": large}}, async_=True)
    assert handle is not None
    with pytest.raises(OSError, match="No space left on device"):
        handle.wait()
    assert files_in(small_disk) == before


def test_a_full_disk_keeps_the_log_and_the_changes(small_disk: Path) -> None:
    table, server = filled(1000), make(dim=16, optimizer=embstore.SGD())
    log = embstore.IncrementLog.create(small_disk / "log", {"model": {"user": table}})
    table.find_or_insert(np.arange(20_000))
    with pytest.raises(OSError, match="No space left on device"):
        log.append({"model": {"user": table}})
    table.erase(np.arange(1500, 20_000))
    assert log.append({"model": {"user": table}}) == 1
    embstore.IncrementLog(small_disk / "log").load({"model": {"user": server}})
    require_same(table, server)


def test_a_folder_without_permission_raises(tmp_path: Path) -> None:
    # Root may write anywhere but where the kernel says no.
    with pytest.raises(OSError, match="/proc/"):
        embstore.dump("/proc/embstore/d", {"model": {"user": filled(10)}})
    with pytest.raises(FileExistsError, match="but is a file"):
        embstore.dump(Path(__file__), {"model": {"user": filled(10)}})


def test_overwriting_swaps_the_whole_folder(tmp_path: Path) -> None:
    one, two = filled(10), filled(20)
    embstore.dump(tmp_path / "d", {"model": {"user": one}, "model.x": {"user": filled(7)}})
    embstore.dump(tmp_path / "d", {"model": {"user": two}}, overwrite=True)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["model"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert embstore.open_dump(tmp_path / "d")["model"]["user"].rows == 20
