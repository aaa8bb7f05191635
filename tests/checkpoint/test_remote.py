"""Dumps and logs on file systems without rename: whole or not at all, and verified when they come back."""

import os
import uuid

import fsspec
import numpy as np
import pytest
from redis_server import free_port

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
