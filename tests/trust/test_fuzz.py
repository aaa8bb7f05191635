"""Short version of trust.fuzz: some of the kept inputs, and some mutations of them."""

import multiprocessing
import os
import re
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trust import fuzz, fuzz_core
from trust.fuzz_folders import EDITS, UNSEALED, WHOLE, Folder, edits, mutated_edits
from trust.fuzz_targets import TARGETS

FOLDERS = [
    name for name, target in TARGETS.items() if isinstance(getattr(target.run, "__self__", None), Folder)
]


def test_the_documentation_tells_what_has_run_of_every_target():
    assert fuzz.ran().keys() <= set(TARGETS)
    assert fuzz.told() + "\n\n" in fuzz.TOLD_IN.read_text()


def test_turns_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "RAN", tmp_path / "ran.json")
    fuzz.count("urls", 12.6, 1000, None, [10, 1234])
    fuzz.count("urls", 7.2, 50, "urls-crash-1", [1230, 1240])
    fuzz.count("log", 1.0, 3, None, [7, 7])
    assert fuzz.ran() == {
        "log": {"seconds": 1, "inputs": 3, "findings": [], "branches": [7, 7]},
        "urls": {"seconds": 20, "inputs": 1050, "findings": ["urls-crash-1"], "branches": [1230, 1240]},
    }
    assert "| urls | 20 | 1,050 | 1,240 | 10 | urls-crash-1 |" in fuzz.told()


def test_turns_of_programs_side_by_side_are_all_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "RAN", tmp_path / "ran.json")
    monkeypatch.setattr(fuzz, "FINDINGS", tmp_path)

    def turns() -> None:
        for _ in range(40):
            fuzz.count("urls", 1.0, 10, None, [1, 2])

    programs = [multiprocessing.get_context("fork").Process(target=turns) for _ in range(4)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
    assert [program.exitcode for program in programs] == [0, 0, 0, 0]
    assert fuzz.ran() == {"urls": {"seconds": 160, "inputs": 1600, "findings": [], "branches": [1, 2]}}


def test_mutations_of_edits_are_edits_and_know_the_words_of_files():
    data, seen = bytes([EDITS, 0, 0, 7, 1, 49]), set()
    for seed in range(5000):
        data = mutated_edits(data, 200, seed, lambda data, most: data)
        assert data[0] == EDITS and len(data) <= 200
        seen.update(what for _, _, what in edits(data[1:]))
    assert {b"NaN", b'"aged_lfu"', b'"Adagrad"', struct.pack("<q", -(2**63)), b""} <= seen
    for whole in (b"", bytes([WHOLE, 3, 4])):
        assert mutated_edits(whole, 7, 0, lambda data, most: data + bytes([most])) == whole + b"\7"


def test_a_corpus_keeps_the_smallest_inputs_and_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path)
    fuzz.keep("t", [b"abc", b"", b"abc", *(bytes([n % 256]) * 3000 for n in range(100))])
    inputs = fuzz.kept("t")
    assert {b"", b"abc"} < set(inputs) and sum(map(len, inputs)) <= fuzz.MOST_KEPT_BYTES < 300_000


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_every_reader_refuses_damaged_input_as_documented(name):
    assert fuzz.replay(name, mutations=40, most_kept=40) > 40


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore")
def test_changes_of_files_get_behind_their_checksums(name):
    """Each file with its last bit flipped, and each edit of the seeds."""
    folder, refused = TARGETS[name].run.__self__, 0

    def message(data):
        try:
            return folder.run(data) or ""
        except TARGETS[name].allowed as error:
            return str(error)

    for seed in folder.seeds():
        file = folder.names[seed[1]]
        if len(seed) < 3 or file.endswith("CHECKSUMS"):
            continue
        changed = seed[:-1] + bytes([seed[-1] ^ 1])
        assert not re.search("checksum|crc32", message(changed)), file
        if seed[0] == WHOLE:
            refused += message(bytes([UNSEALED]) + changed[1:]) != ""
    assert refused > 0


def test_without_clang_the_readers_of_the_engine_are_skipped_by_name(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert fuzz_core.main([]) == 0
    assert "clang++ is missing" in capsys.readouterr().out


@pytest.mark.skipif("EMBSTORE_CORE" in os.environ, reason="the runtime of ASan takes what atheris counts")
def test_inputs_that_reach_new_code_are_kept(tmp_path, monkeypatch):
    """Each turn is a process of its own, which has to see the branches of embstore."""
    monkeypatch.setattr(fuzz, "RAN", tmp_path / "ran.json")
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path / "corpus")
    monkeypatch.setattr(fuzz, "FINDINGS", tmp_path / "fuzz")
    assert "no finding" in fuzz.fuzz("http-body", seconds=2)
    assert len(fuzz.kept("http-body")) > len(TARGETS["http-body"].seeds())
