"""What work costs on one core of a machine, and what its disk does.

machine = Machine.read("machine.json")      # `embstore plan --measure machine.json` wrote it
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of one core, unless the name says otherwise.

    step, table         a training step, whatever its size, and each of its tables
    id, id_byte         an id of a batch, and a byte of its float32 vector: lookup, gradient, sum
    row, row_byte       a distinct row of a batch, and a byte of vector and state: the update
    parallel            share of this work that threads divide
    exchange, sent_table
                        what ranks add to a step, whatever its size, and to each of its tables
    message             one of the messages that a rank sends to each other rank, four a step
    sent_id, sent_byte  an id that goes to its owner; a byte of an id, a vector or a gradient on its way
    wait, wait_byte     what a rank waits for another one, by the clock: in an exchange of messages, and for
                        each of these bytes
    publish, publish_table
                        a dump, an increment or a load, whatever its size, and each of its tables
    round, round_table  what each other rank adds to every message that all ranks exchange in a dump, an
                        increment or a load, and what other ranks add to each table
    file                a file that is made and synced: by the clock
    scan_row            a row of a table, in which an increment looks for changes
    dump_row, dump_byte, load_row, load_byte
                        a row of a dump that is written or loaded, and a byte of it
    reading             share of the work of a load that one thread does while another places rows
    crowded             share by which rows of dumps and loads become more work where ranks are twice as many
                        as cores, and again for each further time
    follow, follow_table, follow_row, follow_byte
                        an increment that a reader follows, each of its tables, each row, a byte of it
    """

    step: float
    table: float
    id: float
    id_byte: float
    row: float
    row_byte: float
    parallel: float
    exchange: float
    sent_table: float
    message: float
    sent_id: float
    sent_byte: float
    publish: float
    dump_row: float
    dump_byte: float
    load_row: float
    load_byte: float
    follow_row: float
    follow_byte: float
    process_bytes: int  # of a rank without tables
    cores: int
    memory_bytes: int
    write_bytes_per_second: float  # of the disk, for all cores, once the bytes are in the page cache
    read_bytes_per_second: float
    scan_row: float = 0.0  # files of earlier versions do not have this and the rest
    publish_table: float = 0.0
    file: float = 0.0
    reading: float = 0.5
    follow: float = 0.0
    follow_table: float = 0.0
    wait: float = 0.0
    wait_byte: float = 0.0
    round: float = 0.0
    round_table: float = 0.0
    crowded: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0:
                raise ValueError(f"{field.name} should be a number of at least 0 but is: {value!r}")
        for name in ("cores", "memory_bytes", "write_bytes_per_second", "read_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} should be above 0 but is: {getattr(self, name)!r}")
        for name in ("parallel", "reading"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} should be between 0 and 1 but is: {getattr(self, name)!r}")

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Machine:
        """What `write` wrote. Raises ValueError when it is something else."""
        try:
            values = json.loads(Path(path).read_bytes())
            return Machine(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: should be a file of `embstore plan --measure` but is not: {error}"
            ) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


# An AMD EPYC (Zen 5) with AVX-512 in a virtual machine of 2 cores and 24 GB that did nothing else, by
# `embstore plan --measure`.
REFERENCE = Machine(
    step=4.1e-5,
    table=2.1e-5,
    id=1.6e-8,
    id_byte=1.0e-10,
    row=4.5e-9,
    row_byte=2.8e-11,
    parallel=0.86,
    exchange=7.2e-4,
    sent_table=8.5e-5,
    message=1.2e-4,
    sent_id=0.0,
    sent_byte=6.4e-10,
    wait=2.1e-4,
    wait_byte=2.9e-10,
    publish=1.2e-3,
    publish_table=2.3e-3,
    round=4.4e-4,
    round_table=7.4e-5,
    file=3.2e-4,
    scan_row=7.8e-9,
    dump_row=6.8e-9,
    dump_byte=4.1e-10,
    load_row=9.0e-8,
    load_byte=3.9e-10,
    reading=0.21,
    follow=5.3e-4,
    follow_table=6.7e-4,
    follow_row=4.7e-8,
    follow_byte=5.8e-11,
    process_bytes=330_000_000,
    cores=2,
    memory_bytes=24 << 30,
    write_bytes_per_second=4.8e9,
    read_bytes_per_second=3.6e9,
)
