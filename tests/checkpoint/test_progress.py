"""Long work tells how far it is: to a function, or with a bar."""

import io
import sys

import numpy as np
import pytest
from checkpoint.tables import make, train

import embstore


@pytest.fixture
def tables():
    table = make()
    train(table, 4)
    return {"model": {"user": table}}


class Heard:
    """A progress function that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))

    def require_complete(self):
        assert self.calls, "nothing was reported"
        done, total = self.calls[-1]
        assert done == total > 0
        assert all(0 <= d <= t for d, t in self.calls)


def test_threads_that_write_together_report_every_byte(tmp_path):
    table = embstore.Table("user", dim=8)
    table.find_or_insert(np.arange(500_000))
    before = embstore.get_num_threads()
    try:
        embstore.set_num_threads(4)
        for number in range(5):
            heard = Heard()
            embstore.dump(tmp_path / f"{number}", {"model": {"user": table}}, progress=heard)
            heard.require_complete()
            assert heard.calls == sorted(heard.calls)
    finally:
        embstore.set_num_threads(before)


def works(tmp_path, tables):
    """Every function that takes `progress`, as a call."""
    table = tables["model"]["user"]
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    for step in range(2):
        train(table, 1, first=step)
        log.append(tables)
    embstore.dump(tmp_path / "made", tables, optim=True)
    fresh = {"model": {"user": make()}}
    filled = {"model": {"user": make()}}
    filled["model"]["user"].find_or_insert([4242])
    grown = make()
    grown.find_or_insert(np.arange(99))
    yield "dump", lambda p: embstore.dump(tmp_path / "d", tables, optim=True, progress=p)
    yield "load", lambda p: embstore.load(tmp_path / "made", fresh, optim=True, progress=p)
    yield "load over rows", lambda p: embstore.load(tmp_path / "made", filled, progress=p)
    yield "merge", lambda p: embstore.merge(tmp_path / "log", tmp_path / "m", progress=p)
    yield "reshard", lambda p: embstore.reshard(tmp_path / "made", tmp_path / "r", 3, progress=p)
    for to in ("v2", "parquet", "safetensors", "sok", "one_embedding"):
        yield to, lambda p, to=to: embstore.convert(tmp_path / "made", tmp_path / to, to, progress=p)
    yield "back", lambda p: embstore.convert(tmp_path / "parquet", tmp_path / "back", "v1a", progress=p)
    yield "compact", lambda p: log.compact(progress=p)
    yield "reserve", lambda p: grown.reserve(50_000, progress=p)


def test_every_long_work_reports_up_to_its_end(tmp_path, tables):
    for name, work in works(tmp_path, tables):
        heard = Heard()
        work(heard)
        try:
            heard.require_complete()
        except AssertionError as error:
            raise AssertionError(name) from error


def test_true_draws_a_bar_named_after_the_work(tmp_path, tables, monkeypatch):
    for name, work in works(tmp_path, tables):
        screen = io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        work(True)
        assert "100%" in screen.getvalue(), name
    assert "growing" in screen.getvalue()


def test_nothing_is_drawn_without_asking(tmp_path, tables, capfd):
    for _, work in works(tmp_path, tables):
        work(False)
    assert capfd.readouterr() == ("", "")


def test_progress_of_another_kind_is_refused_before_anything_is_written(tmp_path, tables):
    with pytest.raises(TypeError, match="progress should be True, False or a function but is: 'yes'"):
        embstore.dump(tmp_path / "d", tables, progress="yes")
    assert list(tmp_path.iterdir()) == []


def test_a_bar_without_tqdm_names_the_extra(tmp_path, tables, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"embstore\[cli\]"):
        embstore.dump(tmp_path / "d", tables, progress=True)
    embstore.dump(tmp_path / "d", tables)
