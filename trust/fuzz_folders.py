"""Folders whose files an input changes, with checksums that are right again afterwards.

An attacker can compute a CRC-32, so what stands behind the checksums has to be fuzzed as well. An input is

    byte 0 % 8   0: byte 1 chooses a file, the rest is its new contents; no checksum is changed
                 1: the same, and the checksums that cover it are recomputed
                 else edits, and checksums as above: file (1), place (2, big-endian), size (1), the new bytes

An edit of a JSON file replaces a value by JSON (an object is added to an object; nothing removes the value);
one of another file writes bytes at an offset (nothing cuts the file off there). `mutated_edits` keeps this
form and knows words that such files have, which random bytes hardly ever hit.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from embstore.initializers import Constant, Normal, Uniform
from embstore.optimizers import OPTIMIZERS
from embstore.options import DType, ScoreStrategy
from embstore.ownership import Ownership

MANIFESTS = ("embstore.json", "serving.json", "manifest.json")
CHUNK = "-000000000000"  # the first of an SSD store
ROW_BYTES = {"": 24, "user/0-1/": 36}  # of the stores that are fuzzed, by where they are in their folder
UNSEALED, WHOLE, EDITS = range(3)
MOST_EDITS = 8
NUMBERS = (0, 1, -1, 2, 3, 127, 255, 65536, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63 - 1, -(2**63))
JSON_VALUES = (
    *NUMBERS,
    2**64 - 1,
    2**64,
    0.5,
    1e-300,
    1e300,
    math.inf,
    math.nan,
    "",
    None,
    True,
    [],
    [1],
    {},
)
NAMES = (
    *(kind.__name__ for kind in (*OPTIMIZERS, Constant, Normal, Uniform)),
    *(member.name.lower() for kind in (DType, Ownership, ScoreStrategy) for member in kind),
    *(
        "v1a",
        "v2",
        "EvictStrategy.KLru",
        "EvictStrategy.KLfu",
        "exact_adagrad",
        "compound",
        "user",
        "../user",
        "/",
    ),
    *("<f8", "<f2", "<i8", "<i4", "<u8", "|b1", "|S4", "<U2", "<c8", "<M8[ns]", "F32", "BF16", "U64", "|O"),
)
PACKED = [
    struct.pack(f"<{size}", number)
    for size, bits in (("b", 7), ("h", 15), ("i", 31), ("q", 63))
    for number in NUMBERS
    if -(2**bits) <= number < 2**bits
]
FLOATS = [struct.pack("<f", number) for number in (0.0, 1.0, -1.0, 3e38, math.inf, math.nan)]
WORDS = [*(json.dumps(value).encode() for value in (*JSON_VALUES, *NAMES)), *PACKED, *FLOATS, b""]

Files = dict[str, bytes]  # by their names in the folder


class Folder:
    """A folder that was written properly; inputs change it. `spare` are files that inputs may add."""

    def __init__(
        self, make: Callable[[Path], object], use: Callable[[Path], object], spare: tuple[str, ...] = ()
    ) -> None:
        self._make, self._use, self._spare = make, use, spare
        self._place = Path()
        self._valid: Files = {}
        self.names: list[str] = []

    def _prepare(self) -> None:
        if self._valid:
            return
        numbers = itertools.count()
        self._place = Path(tempfile.mkdtemp(prefix="embstore-fuzz-")) / "valid"
        # The same names of dumps in each run, so that kept inputs go on fitting to other files.
        with mock.patch("secrets.token_hex", lambda n: f"{next(numbers):0{2 * n}x}"):
            self._make(self._place)
        paths = sorted(path for path in self._place.rglob("*") if path.is_file())
        self._valid = {str(path.relative_to(self._place)): path.read_bytes() for path in paths}
        self.names = [*self._valid, *self._spare]

    def seeds(self) -> list[bytes]:
        self._prepare()
        whole = [bytes([WHOLE, i]) + data for i, data in enumerate(self._valid.values())]
        edits = [bytes([EDITS, i, 0, at, 4]) + b"\xff" * 4 for i in range(len(self.names)) for at in (0, 9)]
        return [*whole, *edits]

    def run(self, data: bytes) -> None:
        self._prepare()
        files = self.changed(data)
        other = [name for name in files if files[name] != self._valid.get(name)]
        try:
            for name in other:
                self._put(name, files[name])
            self._use(self._place)
        finally:
            for name in other:
                self._put(name, self._valid.get(name))
            for beside in self._place.parent.iterdir():
                if beside != self._place:
                    shutil.rmtree(beside)

    def _put(self, name: str, data: bytes | None) -> None:
        """A new file each time: an old one may still be mapped."""
        path = self._place / name
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)

    def changed(self, data: bytes) -> Files:
        """The files that an input makes."""
        self._prepare()
        files, kind = dict(self._valid), data[0] % 8 if data else UNSEALED
        if kind < EDITS:
            name = self.names[(data[1] if len(data) > 1 else 0) % len(self.names)]
            files[name] = data[2:]
            return files if kind == UNSEALED else sealed(files, {name})
        names = set()
        for number, place, what in edits(data[1:]):
            name = self.names[number % len(self.names)]
            files[name] = edited(files.get(name, b""), place, what)
            names.add(name)
        return sealed(files, names)


# ---- edits


def edits(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(file, place, what) of each edit."""
    while len(data) >= 4:
        number, place, size = struct.unpack(">BHB", data[:4])
        yield number, place, data[4 : 4 + size]
        data = data[4 + size :]


def mutated_edits(data: bytes, most: int, seed: int, otherwise: Callable[[bytes, int], bytes]) -> bytes:
    """Another input of at most so many bytes; by `otherwise` one in four, and all that are no edits."""
    rng = random.Random(seed)
    if not data or data[0] % 8 < EDITS or rng.randrange(4) == 0:
        return otherwise(data, most)
    parts = list(edits(data[1:]))[:MOST_EDITS]
    at = rng.randrange(len(parts) + 1)
    if at == len(parts):
        parts.append((rng.randrange(256), rng.randrange(65536), rng.choice(WORDS)))
    elif len(parts) > 1 and rng.randrange(4) == 0:
        del parts[at]
    else:
        number, place, what = parts[at]
        change = rng.randrange(5)
        if change == 0:
            number = rng.randrange(256)
        elif change == 1:
            place = rng.randrange(65536)
        elif change == 2:
            place = max(0, place + rng.choice((-8, -1, 1, 8)))
        elif change == 3:
            what = otherwise(what, 255)[:255]
        else:
            what = rng.choice(WORDS)
        parts[at] = number, place % 65536, what
    packed = (struct.pack(">BHB", number, place, len(what)) + what for number, place, what in parts)
    return (data[:1] + b"".join(packed))[:most]


def edited(data: bytes, place: int, what: bytes) -> bytes:
    document = json_object(data)
    if document is not None:
        edit_json(document, place, what)
        return json.dumps(document).encode()
    at = place % (len(data) + 1)
    return data[:at] + what + data[at + len(what) :] if what else data[:at]


def edit_json(document: dict[str, Any], place: int, what: bytes) -> None:
    values = list(_values(document))
    if not values:
        return
    holder, key = values[place % len(values)]
    try:
        new = json.loads(what)
    except (ValueError, RecursionError):
        new = what.decode(errors="replace")
    if not what:
        del holder[key]
    elif isinstance(new, dict) and isinstance(holder[key], dict):
        holder[key].update(new)
    else:
        holder[key] = new


def json_object(data: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _values(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below a document, as what holds it and its key there."""
    keys = sorted(document) if isinstance(document, dict) else range(len(document))
    for key in keys:
        yield document, key
        if isinstance(document[key], (dict, list)):
            yield from _values(document[key])


# ---- checksums


def sealed(files: Files, changed: set[str]) -> Files:
    """The files with new checksums wherever they cover a changed one."""
    files, changed = dict(files), set(changed)
    for name in [name for name in files if name.endswith(".index") and name in changed]:
        files[name] = _sealed_index(files[name])
    for name in [name for name in files if name.endswith("VALUE_SIZE")]:
        _seal_store(files, name.removesuffix("VALUE_SIZE"), changed)
    for name in [name for name in files if os.path.basename(name) in MANIFESTS]:
        files[name] = _sealed_manifest(name, files, changed)
    return files


def _sealed_manifest(name: str, files: Files, changed: set[str]) -> bytes:
    document = json_object(files[name])
    if document is None:
        return files[name]
    folder, found = os.path.dirname(name), False
    for other in changed - {name}:
        if other in files and other.startswith(f"{folder}/" if folder else ""):
            data = files[other]
            for entry in _entries(document, os.path.basename(other)):
                entry |= {"bytes": len(data), "crc32": zlib.crc32(data)}
                found = True
    if not found and name not in changed:
        return files[name]
    document.pop("crc32", None)
    try:
        text = json.dumps(document, indent=1, sort_keys=True)
    except (ValueError, RecursionError):
        return files[name]
    document["crc32"] = zlib.crc32(text.encode())
    return json.dumps(document).encode()


def _entries(document: Any, file: str) -> Iterator[dict[str, Any]]:
    """What a manifest says of a file, wherever it stands."""
    for holder, key in list(_values(document)):
        entry = holder[key]
        if key == "files" and isinstance(entry, dict) and isinstance(entry.get(file), dict):
            yield entry[file]


def _sealed_index(data: bytes) -> bytes:
    """A served index: checksums of the lines and of the 60 bytes before that of the header."""
    if len(data) < 64:
        return data
    head = data[:40] + struct.pack("<I", zlib.crc32(data[64:])) + data[44:60]
    return head + struct.pack("<I", zlib.crc32(head)) + data[64:]


def _seal_store(files: Files, root: str, changed: set[str]) -> None:
    """The checksums of rows, which cover key, row and score, and those of the snapshots' files."""
    own = {name.removeprefix(root) for name in changed if name.startswith(root)}
    if any(name.startswith(("keys/", "values/", "meta/")) for name in own):
        _seal_rows(files, root)
    for folder in {os.path.dirname(name) for name in own if name.startswith("snapshots/")}:
        here = f"{root}{folder}/"
        if here + "CHECKSUMS" in changed:
            continue
        names = sorted(name for name in files if name.startswith(here) and not name.endswith("CHECKSUMS"))
        lines = [
            f"{name.removeprefix(here)} {len(files[name])} {zlib.crc32(files[name]):08x}\n" for name in names
        ]
        files[here + "CHECKSUMS"] = "".join(lines).encode()


def _seal_rows(files: Files, root: str) -> None:
    """Of stores with keys of 8 bytes and blocks of 4096."""
    keys, values, meta = (files[f"{root}{name}{CHUNK}"] for name in ("keys/key", "values/value", "meta/meta"))
    size = ROW_BYTES[root]
    in_block = 4096 // size
    again = bytearray(meta)
    for i in range(min(len(keys) // 8, len(meta) // 12)):
        at = i // in_block * 4096 + i % in_block * size
        row, score = values[at : at + size], meta[12 * i : 12 * i + 8]
        crc = zlib.crc32(row, zlib.crc32(keys[8 * i : 8 * i + 8])) ^ zlib.crc32(score)
        again[12 * i + 8 : 12 * i + 12] = struct.pack("<I", crc)
    files[f"{root}meta/meta{CHUNK}"] = bytes(again)
