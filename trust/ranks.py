"""Ranks that are killed: the others raise, and training resumes from what was saved, to the same losses.

    python -m trust.ranks                  100 rounds
    python -m trust.ranks --rounds 6 --ranks 4

A round starts real ranks over gloo and kills one of them (kill -9) at a random moment: while it connects,
while it makes the model, in a step, or while rows are saved. Rows are saved by dumps, by dumps in the
background or by a log. The rendezvous store is in rank 0, which may be the victim, or in a process of its
own, as with torchrun, which may freeze at the same moment, as if the network were gone. The other ranks have
to raise within the timeout of the group; new ranks then go on from what was saved, which is at least what was
acknowledged, to the losses and rows of a run that nobody disturbed, to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from trust import training_job as job

ROOT = Path(__file__).parents[1]
STORES = ("rank 0", "a process", "a frozen process")
PHASES = {"connection": "connecting", "construction": "making", "step": "step", "save": "saving"}
MOST_SECONDS = job.GROUP_SECONDS + 15  # for the others to raise; the machine may be busy
RUN_SECONDS = 100  # for all ranks to end


class Rank:
    """A forked process; `said` are its lines with the time they came."""

    def __init__(self, work: Callable[[job.Say], None]) -> None:
        self.pipe, writer = os.pipe()
        self.process = os.fork()
        self.said: list[tuple[float, str]] = []
        if self.process == 0:
            with contextlib.suppress(BaseException):
                os.close(self.pipe)
                faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs
                signal.alarm(RUN_SECONDS)  # a hang ends with SIGALRM

                def say(what: str) -> None:
                    os.write(writer, f"{what}\n".encode())

                work(say)
            os._exit(0)
        os.close(writer)

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def lines(self, kind: str) -> list[list[str]]:
        return [words[1:] for words in (text.split() for _, text in self.said) if words[0] == kind]

    def wait(self) -> None:
        os.close(self.pipe)
        _, status = os.waitpid(self.process, 0)
        self.ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def rank_work(rank: int, world: int, port: int, hosted: bool, folder: Path, way: str) -> Callable:
    def init() -> None:
        timeout = timedelta(seconds=job.GROUP_SECONDS)
        is_server = rank == 0 and not hosted
        store = job.dist.TCPStore(
            "127.0.0.1", port, is_master=is_server, timeout=timeout, wait_for_workers=False
        )
        job.dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)

    return lambda say: job.run(folder, way, say, init)


def store_work(port: int) -> Callable[[job.Say], None]:
    def work(say: job.Say) -> None:
        store = job.dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        say("ready")
        time.sleep(RUN_SECONDS)
        del store

    return work


def start(world: int, hosted: bool, folder: Path, way: str) -> tuple[list[Rank], Rank | None]:
    from ports import free_port

    port = free_port()
    host = Rank(store_work(port)) if hosted else None
    if host:
        os.read(host.pipe, 100)
    return [Rank(rank_work(rank, world, port, hosted, folder, way)) for rank in range(world)], host


def listen(ranks: list[Rank], heard: Callable[[Rank, str], None]) -> None:
    """Until all ranks have ended."""
    by_pipe, rest = {rank.pipe: rank for rank in ranks}, dict.fromkeys(ranks, "")
    while by_pipe:
        for pipe in select.select(list(by_pipe), [], [])[0]:
            rank, data = by_pipe[pipe], os.read(pipe, 65536).decode()
            if not data:
                del by_pipe[pipe]
                continue
            *lines, rest[rank] = (rest[rank] + data).split("\n")
            for line in lines:
                rank.said.append((time.monotonic(), line))
                heard(rank, line)


@dataclass(frozen=True)
class Round:
    phase: str
    way: str
    victim: int
    store: str  # where the rendezvous store is
    occasion: int  # which step, which save
    share: float  # of the usual duration of the phase, when the victim is killed


@dataclass
class Reference:
    """What a run without a fault says, and how long its phases take."""

    losses: dict[tuple[int, str], str]
    rows: str
    seconds: dict[tuple[str, str], float]


def losses_of(ranks: list[Rank]) -> dict[tuple[int, str], str]:
    return {(i, step): loss for i, rank in enumerate(ranks) for step, loss in rank.lines("loss")}


def undisturbed(world: int, folder: Path, way: str) -> tuple[list[Rank], str]:
    """Trains to the end. Returns the ranks and the hash of the rows."""
    ranks, host = start(world, True, folder, way)
    listen(ranks, lambda rank, line: None)
    end(ranks, host)
    assert host is not None
    found = {tuple(words) for rank in ranks for words in rank.lines("rows")}
    assert len(found) == 1, [(rank.said[-1:], f"signal {rank.ended_by}") for rank in ranks]
    return ranks, found.pop()[0]


def end(ranks: list[Rank], host: Rank | None) -> None:
    if host:
        host.kill()
        host.wait()
    for rank in ranks:
        rank.wait()


def reference(world: int, folder: Path, ways: set[str]) -> Reference:
    seconds, losses, rows = {}, {}, ""
    for way in sorted(ways):
        (folder / way).mkdir()
        ranks, rows = undisturbed(world, folder / way, way)
        assert not losses or losses == losses_of(ranks), "ways to save give different losses"
        losses = losses_of(ranks)
        said = ranks[0].said
        for phase, word in PHASES.items():
            spans = [
                then[0] - now[0] for now, then in zip(said, said[1:], strict=False) if now[1].startswith(word)
            ]
            seconds[phase, way] = sorted(spans)[len(spans) // 2]
    return Reference(losses, rows, seconds)


def disturbed(
    world: int, folder: Path, plan: Round, usual: float, wanted: Reference
) -> tuple[str, float] | None:
    """Kills a rank, and checks the others. Returns what they raised, and how long the last one took; None
    where the victim, or all that the others needed of it, had ended before."""
    ranks, host = start(world, plan.store != "rank 0", folder, plan.way)
    count, killed = 0, 0.0

    def heard(rank: Rank, line: str) -> None:
        nonlocal count, killed
        if rank is ranks[plan.victim] and line.startswith(PHASES[plan.phase]) and not killed:
            if count == plan.occasion:
                time.sleep(usual * plan.share)
                if host and plan.store == "a frozen process":
                    os.kill(host.process, signal.SIGSTOP)
                rank.kill()
                killed = time.monotonic()
            count += 1

    listen(ranks, heard)
    end(ranks, host)
    if ranks[plan.victim].ended_by != signal.SIGKILL:
        return None
    others = [rank for rank in ranks if rank is not ranks[plan.victim]]
    raised, slowest = [], 0.0
    for rank in others:
        assert rank.ended_by == 0, f"a rank ended by signal {rank.ended_by}: {rank.said[-1:]}"
        when, text = rank.said[-1]
        if text == f"rows {wanted.rows}":
            continue
        assert text.startswith("error "), f"a rank ended with {text!r}"
        raised.append(text.split()[1])
        slowest = max(slowest, when - killed)
    if not raised:
        return None
    # They may be in the middle of making the model, which is the longest that they do by themselves.
    most = MOST_SECONDS + wanted.seconds["construction", plan.way]
    most += 3 * job.GROUP_SECONDS if plan.phase == "connection" else 0  # gloo tries four times to connect
    assert slowest < most, f"the others raise after {slowest:.1f} s, more than {most:.1f} s"
    acknowledged = max((int(n) for rank in ranks for (n,) in rank.lines("saved")), default=0)
    found = job.newest(folder, plan.way)
    assert found >= acknowledged, f"{acknowledged} was acknowledged, but the newest is {found}"
    return "+".join(sorted(set(raised))), slowest


def check(world: int, folder: Path, plan: Round, wanted: Reference) -> tuple[str, float]:
    """One round. Raises AssertionError where a promise was broken."""
    usual = wanted.seconds[plan.phase, plan.way]
    while (found := disturbed(world, folder, plan, usual, wanted)) is None:
        shutil.rmtree(folder)
        folder.mkdir()
        usual /= 4  # the machine was slower when it was measured
    raised, seconds = found
    ranks, rows = undisturbed(world, folder, plan.way)
    losses = losses_of(ranks)
    assert losses == {at: wanted.losses[at] for at in losses}, "losses differ after the restart"
    assert rows == wanted.rows, "rows differ after the restart"
    return raised, seconds


def rounds_of(count: int, world: int, seed: int) -> list[Round]:
    rng = random.Random(seed)
    occasions = {
        "connection": 1,
        "construction": 1,
        "step": job.STEPS,
        "save": job.STEPS // job.STEPS_PER_SAVE,
    }
    found = []
    for number in range(count):
        phase = list(PHASES)[number % len(PHASES)]
        way = job.WAYS[number // len(PHASES) % len(job.WAYS)]
        victim = rng.randrange(world)
        # torch itself waits forever for a store that freezes while it connects.
        store = STORES[number % (2 if phase == "connection" else 3)]
        found.append(Round(phase, way, victim, store, rng.randrange(occasions[phase]), rng.uniform(0, 1.2)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the moments; chosen and told by default")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests"))
    seed = secrets.randbits(31) if options.seed is None else options.seed
    broken, ends, slowest = 0, Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = rounds_of(options.rounds, options.ranks, seed)
        wanted = reference(options.ranks, folder, {plan.way for plan in plans})
        for number, plan in enumerate(plans):
            place = folder / f"round-{number}"
            place.mkdir()
            try:
                raised, seconds = check(options.ranks, place, plan, wanted)
            except AssertionError as error:
                broken += 1
                print(f"{plan}, seed {seed}: {error}", file=sys.stderr, flush=True)
                continue
            ends[f"{plan.phase}: {raised}"] += 1
            slowest = max(slowest, seconds)
    for what, times in sorted(ends.items()):
        print(f"killed in {what}: {times} times")
    told = f"{options.rounds} rounds of {options.ranks} ranks, seed {seed}"
    print(f"{told}: the others raise within {slowest:.1f} s")
    print(f"{broken} broken promises")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
