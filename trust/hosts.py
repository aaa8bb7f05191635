"""Two hosts on one machine: network namespaces with a wire between them that can be slow, lossy or cut.

    host a ── veth ── wire: a process that forwards frames ── veth ── host b
    10.77.0.1                                                      10.77.0.2

Frames are forwarded by a program, so that loss and delay do not depend on tc netem, which many kernels lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import mmap
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ALL_FRAMES = 263, 15, 4, 3
MOST_FRAME_BYTES = 1 << 17


def unavailable() -> str | None:
    """Why there cannot be hosts here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    try:
        with Hosts():
            return None
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        return f"this machine has no network namespaces: {str(reason).strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


class Hosts:
    """`with Hosts() as hosts:` makes them and takes them down."""

    def __init__(self) -> None:
        self._names = {which: f"embstore-{os.getpid()}-{which}" for which in ("a", "b", "wire")}
        self._settings = mmap.mmap(-1, 16)  # of the wire: (delay in seconds, share of frames that are lost)
        self._wire = 0

    def __enter__(self) -> Hosts:
        try:
            for name in self._names.values():
                _ip("netns", "add", name)
            wire = self._names["wire"]
            for which, address in ADDRESSES.items():
                host = self._names[which]
                _ip(
                    "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", which, "netns", wire
                )
                _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
                for namespace, link in ((host, "lo"), (host, "eth0"), (wire, which)):
                    _ip("-n", namespace, "link", "set", "dev", link, "up")
            self._wire = self.fork("wire", self._forward)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._wire:
            os.kill(self._wire, signal.SIGKILL)
            os.waitpid(self._wire, 0)
            self._wire = 0
        for name in self._names.values():
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)

    # ---- the wire

    @contextlib.contextmanager
    def bad_wire(self, delay_seconds: float, loss: float) -> Iterator[None]:
        self._settings[:] = struct.pack("dd", delay_seconds, loss)
        try:
            yield
        finally:
            self._settings[:] = struct.pack("dd", 0, 0)

    @contextlib.contextmanager
    def cut_wire(self) -> Iterator[None]:
        _ip("-n", self._names["b"], "link", "set", "dev", "eth0", "down")
        try:
            yield
        finally:
            _ip("-n", self._names["b"], "link", "set", "dev", "eth0", "up")

    def _forward(self) -> None:
        """Between the two ends, forever."""
        ends = []
        for which in ADDRESSES:
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES))
            end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # frames keep their offloads: sizes and checksums
            end.bind((which, ALL_FRAMES))
            ends.append(end)
        other = {ends[0]: ends[1], ends[1]: ends[0]}
        rng = random.Random(0)
        waiting: list[tuple[float, int, socket.socket, bytes]] = []
        number = 0
        while True:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for end in select.select(ends, [], [], pause)[0]:
                frame, address = end.recvfrom(MOST_FRAME_BYTES)
                delay, loss = struct.unpack("dd", self._settings[:])
                if address[2] != PACKET_OUTGOING and rng.random() >= loss:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, number, other[end], frame))
            while waiting and waiting[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # an end that is down
                    waiting[0][2].send(waiting[0][3])
                heapq.heappop(waiting)

    # ---- programs on a host

    def fork(self, which: str, work: Callable[[], object]) -> int:
        """A process on a host; it ends with 0 unless `work` raises. Returns its id."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            space = os.open(f"/var/run/netns/{self._names[which]}", os.O_RDONLY)
            if libc.setns(space, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def start(self, which: str, command: list[str], **options: object) -> subprocess.Popen:
        """A program on a host, in a process group of its own."""
        prefix = ["ip", "netns", "exec", self._names[which]]
        return subprocess.Popen([*prefix, *command], start_new_session=True, **options)  # type: ignore[call-overload]
