"""Dumps and logs on file systems without rename: whole or not at all, and verified when they come back."""

import os
import uuid

import fsspec
import numpy as np
import pytest
from ports import free_port

import embstore
from embstore.checkpoint.remote import MARKER, Mirror, RemoteFolder
from embstore.serving import Reader

KEYS = np.arange(-20, 303)


def trained(name="user"):
    made = embstore.Table(name, dim=4, optimizer=embstore.SGD(lr=0.5), score_strategy="step")
    made.find_or_insert(KEYS)
    return made


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3 on the loopback interface."""
    server = pytest.importorskip("moto.server")
    port = free_port()
    running = server.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    running.start()
    options = {
        "key": "a",
        "secret": "b",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
    }
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    running.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def place(request, tmp_path):
    """A URL that is free, and the options of its file system."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"s3://bucket/{name}", request.getfixturevalue("s3")
    return (f"file://{tmp_path}/{name}" if request.param == "file" else f"memory://{name}"), {}


def test_a_dump_comes_back_as_it_was_and_is_swapped_in_one_step(tmp_path, place):
    url, options = place
    user = trained()
    remote = RemoteFolder(url, **options)
    assert remote.current() is None
    with pytest.raises(FileNotFoundError, match=url):
        remote.download(tmp_path / "nothing")
    embstore.dump(tmp_path / "a", {"m": {"user": user}}, optim=True)
    remote.upload(tmp_path / "a")
    with pytest.raises(FileExistsError):
        remote.upload(tmp_path / "a")
    remote.download(tmp_path / "b")
    embstore.open_dump(tmp_path / "b").verify()
    np.testing.assert_array_equal(
        Reader(url, cache=tmp_path / "c", **options).find("user", KEYS)[0], user.find(KEYS)[0]
    )
    before = remote.current()["folder"]
    user.erase(KEYS[:7])
    embstore.dump(tmp_path / "a2", {"m": {"user": user}})
    remote.upload(tmp_path / "a2", overwrite=True)
    assert sorted(remote.names()) == sorted([MARKER, remote.current()["folder"]])
    assert before not in remote.names()
    assert Reader(url, cache=tmp_path / "c", **options).state.rows("user") == len(user)


def test_damage_on_the_way_is_refused_and_leaves_nothing(tmp_path, place):
    url, options = place
    embstore.dump(tmp_path / "a", {"m": {"user": trained()}})
    remote = RemoteFolder(url, **options)
    remote.upload(tmp_path / "a")
    fs, root = fsspec.core.url_to_fs(url, **options)
    victim = f"{root}/{remote.current()['folder']}/m/user_values"
    good = fs.cat_file(victim)
    fs.pipe_file(victim, good[:-4] + b"abcd")
    with pytest.raises(embstore.CheckpointError, match="m/user_values is damaged"):
        remote.download(tmp_path / "b")
    fs.rm_file(victim)
    with pytest.raises(embstore.CheckpointError, match="m/user_values is missing"):
        remote.download(tmp_path / "b")
    fs.pipe_file(victim, good)
    remote.download(tmp_path / "b")
    marker = f"{root}/{MARKER}"
    fs.pipe_file(marker, fs.cat_file(marker).replace(b"m/user_values", b"../ser_values"))
    with pytest.raises(embstore.CheckpointError, match="checksum"):
        remote.download(tmp_path / "c")
    assert not (tmp_path / "c").exists() and not [p for p in tmp_path.iterdir() if ".partial-" in p.name]


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    from embstore.checkpoint.files import sealed

    remote = RemoteFolder(f"file://{tmp_path}/x")
    (tmp_path / "x").mkdir()
    document = {"format": "embstore-remote", "version": 1, "folder": "f"}
    for name in ("../evil", "/etc/evil", "a/../../evil"):
        (tmp_path / "x" / MARKER).write_text(sealed({**document, "files": {name: {"bytes": 1, "crc32": 0}}}))
        with pytest.raises(embstore.CheckpointError, match="outside of its folder"):
            remote.download(tmp_path / "y")


def test_an_upload_that_fails_publishes_nothing(tmp_path, monkeypatch):
    embstore.dump(tmp_path / "a", {"m": {"user": trained()}})
    remote = RemoteFolder(f"memory://{uuid.uuid4().hex}")
    remote.upload(tmp_path / "a")
    before = remote.current()
    os.chmod(tmp_path / "a" / "m" / "user_scores", 0)
    (tmp_path / "a" / "m" / "user_scores").unlink()
    (tmp_path / "a" / "m" / "user_scores").symlink_to("/proc/self/mem")  # opens, but cannot be read
    with pytest.raises((OSError, embstore.CheckpointError)):
        remote.upload(tmp_path / "a", overwrite=True)
    assert remote.current() == before
    assert sorted(remote.names()) == sorted([MARKER, before["folder"]])


def test_a_reader_follows_a_remote_log_through_compaction(tmp_path, place):
    url, options = place
    user = trained()
    tables = {"m": {"user": user}}
    log = embstore.IncrementLog.create(tmp_path / "log", tables)
    mirror = Mirror(url, tmp_path / "log", **options)
    assert mirror.push() == ["base-000000000000"]
    reader = Reader(url, cache=tmp_path / "cache", **options)
    for number in range(1, 5):
        user.find_or_insert([1000 + number])
        user.erase([number])
        log.append(tables)
        if number == 3:
            log.compact()
        assert reader.follow() == []  # not pushed yet
        mirror.push()
        assert mirror.push() == []
        assert reader.follow() == [number]
        vectors, found = reader.find("user", np.arange(-20, 1010))
        expected, there = user.find(np.arange(-20, 1010))
        np.testing.assert_array_equal(found, there)
        np.testing.assert_array_equal(vectors, expected)
    late = Reader(url, cache=tmp_path / "other", **options)
    assert late.state.number == 4 and late.state.rows("user") == len(user)
    with pytest.raises(TypeError, match="with a URL alone"):
        Reader(tmp_path / "log", token="x")


# ---- URLs instead of paths


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A cache of its own, so that every test begins on a new host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    return tmp_path / "host"


@pytest.mark.parametrize("async_", [False, True])
def test_a_dump_goes_to_a_url_and_comes_back(place, host, async_):
    url, options = place
    user = trained()
    tables = {"m": {"user": user}}
    handle = embstore.dump(url, tables, optim=True, async_=async_, storage_options=options)
    if handle:
        handle.wait()
    with pytest.raises(FileExistsError, match=url):
        embstore.dump(url, tables, storage_options=options)
    back = embstore.Table("user", dim=4, optimizer=embstore.SGD(lr=0.5), score_strategy="step")
    embstore.load(url, {"m": {"user": back}}, optim=True, storage_options=options)
    np.testing.assert_array_equal(back.rows().keys, user.rows().keys)
    np.testing.assert_array_equal(back.rows().values, user.rows().values)
    user.erase(KEYS[:7])
    embstore.dump(url, tables, overwrite=True, storage_options=options)
    dump = embstore.open_dump(url, storage_options=options)
    assert dump["m"]["user"].rows == len(user)
    dump.verify()
    # The copy of what was replaced is gone from this host.
    assert len([path for path in (host / "embstore" / "remote").iterdir() if path.is_dir()]) == 1


def test_options_of_a_file_system_need_a_url(tmp_path):
    tables = {"m": {"user": trained()}}
    for call in (embstore.dump, embstore.load, lambda path, _, **o: embstore.IncrementLog(path, **o)):
        with pytest.raises(TypeError, match="with a URL alone"):
            call(tmp_path / "x", tables, storage_options={"key": "a"})
    with pytest.raises(FileNotFoundError, match="memory://nothing-there"):
        embstore.load("memory://nothing-there", tables)
    assert not (tmp_path / "x").exists()


def test_a_dump_that_cannot_be_uploaded_leaves_nothing(tmp_path, host, monkeypatch):
    def broken(self, local, *, overwrite=False):
        raise OSError(5, "the network is gone")

    monkeypatch.setenv("TMPDIR", str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(RemoteFolder, "upload", broken)
    with pytest.raises(OSError, match="the network is gone"):
        embstore.dump("memory://broken", {"m": {"user": trained()}})
    assert list((tmp_path / "spool").iterdir()) == []
    assert RemoteFolder("memory://broken").current() is None


def test_a_log_at_a_url_is_written_followed_compacted_and_taken_up_again(tmp_path, place, host):
    url, options = place
    user = trained()
    tables = {"m": {"user": user}}
    log = embstore.IncrementLog.create(url, tables, storage_options=options)
    with pytest.raises(FileExistsError, match=url):
        embstore.IncrementLog.create(url, tables, storage_options=options)

    def other_host(name):
        return embstore.IncrementLog(url, local=tmp_path / name, storage_options=options)

    server = trained()
    following = other_host("server")
    assert following.load({"m": {"user": server}}) == 0
    reader = Reader(url, cache=tmp_path / "cache", **options)
    for number in range(1, 6):
        user.find_or_insert([1000 + number])
        user.erase([number])
        assert log.append(tables) == number
        if number == 2:
            assert log.compact() == 2
        if number == 4:
            assert other_host("compactor").compact() == 4  # by another process
        assert following.follow({"m": {"user": server}}) == [number]
        assert reader.follow() == [number]
        np.testing.assert_array_equal(server.rows().keys, user.rows().keys)
        np.testing.assert_array_equal(reader.find("user", KEYS)[1], user.contains(KEYS))
    assert other_host("late").verify() > 0 and other_host("late").last() == 5
    names = RemoteFolder(url, **options).names()
    assert "base-000000000004" in names and "increment-000000000001" not in names
    # The trainer starts again, elsewhere.
    again = trained()
    resumed = other_host("again")
    assert resumed.load({"m": {"user": again}}, writable=True) == 5
    again.erase([100])
    assert resumed.append({"m": {"user": again}}) == 6
    assert reader.follow() == [6] and not reader.find("user", [100])[1].any()
    # The first one is behind, and says so instead of writing a second number 6.
    for _ in range(2):
        with pytest.raises(embstore.CheckpointError, match="increment-000000000006 was written by another"):
            log.append(tables)
    assert log.load(tables, writable=True) == 6
    assert log.append(tables) == 7
    np.testing.assert_array_equal(user.rows().keys, again.rows().keys)
    assert reader.follow() == [7]


def test_an_increment_that_did_not_get_there_goes_with_the_next(tmp_path, host, monkeypatch):
    url = f"memory://{uuid.uuid4().hex}"
    user = trained()
    tables = {"m": {"user": user}}
    log = embstore.IncrementLog.create(url, tables)
    upload = RemoteFolder.upload

    def broken(self, local, *, overwrite=False):
        raise OSError(5, "the network is gone")

    user.erase([7])
    monkeypatch.setattr(RemoteFolder, "upload", broken)
    with pytest.raises(OSError, match="the network is gone"):
        log.append(tables)
    monkeypatch.setattr(RemoteFolder, "upload", upload)
    user.erase([8])
    assert log.append(tables) == 2
    server = trained()
    assert embstore.IncrementLog(url, local=tmp_path / "server").load({"m": {"user": server}}) == 2
    np.testing.assert_array_equal(server.rows().keys, user.rows().keys)


def test_a_trainer_publishes_to_a_url_in_the_background(tmp_path, host):
    url = f"file://{tmp_path}/remote"
    user = trained()
    tables = {"m": {"user": user}}
    log = embstore.IncrementLog.create(url, tables)
    with log.append_every(tables, seconds=0.0, compact_after=2) as publisher:
        for key in range(100_000):
            user.find_or_insert([5000 + key])
            publisher.step()
            if len(log.entries()["base"]) > 1:
                break
    reader = Reader(url, cache=tmp_path / "cache")
    assert reader.state.base >= 2 and reader.state.rows("user") == len(user)


def test_what_nobody_has_opened_for_long_is_swept(tmp_path):
    from embstore.checkpoint import host_cache

    embstore.dump(tmp_path / "old", {"m": {"user": trained()}})
    embstore.dump(tmp_path / "new", {"m": {"user": trained()}})
    cache = tmp_path / "cache"
    first = Reader(tmp_path / "old", cache=cache)
    (old,) = [path for path in cache.iterdir() if path.is_dir()]
    week = 8 * 24 * 3600
    lock = cache / f"{old.name}.lock"
    os.utime(lock, (lock.stat().st_mtime - week,) * 2)
    with host_cache.locked(old, shared=True):
        os.utime(lock, (lock.stat().st_mtime - week,) * 2)
        Reader(tmp_path / "new", cache=cache)
        assert old.is_dir()  # somebody is opening it
    Reader(tmp_path / "new", cache=cache)
    assert not old.exists() and len([path for path in cache.iterdir() if path.is_dir()]) == 1
    assert first.find("user", KEYS)[1].all()  # mapped files stay
    assert Reader(tmp_path / "old", cache=cache).find("user", KEYS)[1].all()


def test_commands_take_urls(tmp_path, host):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from embstore.cli.commands import app

    def run(*arguments):
        return CliRunner().invoke(app, arguments)

    user = trained()
    tables = {"m": {"user": user}}
    dump, log = f"file://{tmp_path}/d", f"file://{tmp_path}/log"
    embstore.dump(dump, tables)
    writer = embstore.IncrementLog.create(log, tables)
    user.erase([7])
    writer.append(tables)
    assert '"rows": 323' in run("inspect", dump, "--json").stdout
    assert run("verify", log).exit_code == 0
    assert run("get", dump, "7").exit_code == 0
    assert run("get", log, "7").exit_code == 1  # erased
    assert run("inspect", "memory://nothing").exit_code == 2
    (victim,) = (tmp_path / "d").glob("*/m/user_values")
    victim.write_bytes(b"short")
    import shutil

    shutil.rmtree(host)  # a new host
    assert run("inspect", dump).exit_code == 3
