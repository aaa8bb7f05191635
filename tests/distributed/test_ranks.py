"""Ranks come to one verdict: real processes over gloo, one of which fails, stays away or dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import jobs
from faces.dynamicemb import ranks

from embstore.distributed.messages import PIECE_BYTES
from embstore.distributed.ranks import Ranks

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(300)]

# what the failing rank raises, and what the others do
RAISED = {
    "errno": ("OSError", "OSError"),
    "key": ("KeyError", "KeyError"),
    "own": ("OwnError", "RuntimeError"),
    "ctrl-c": ("KeyboardInterrupt", "RuntimeError"),
    "exit": ("SystemExit", "RuntimeError"),
    "codec": ("UnicodeDecodeError", "UnicodeError"),
}


@pytest.mark.parametrize("method", ["agree", "together", "share"])
@pytest.mark.parametrize("which", RAISED)
def test_every_kind_of_failure_on_one_rank_raises_on_all_and_names_the_rank(which: str, method: str) -> None:
    failing = 2
    answers = ranks.run(3, jobs.fail, method, which, failing)
    mine, theirs = RAISED[which]
    reason = str(jobs.FAILURES[which]())
    assert answers[failing][:2] == (mine, reason)
    for rank in (0, 1):
        kind, message, errno = answers[rank]
        assert kind == theirs and reason in message and "on rank 2" in message
        assert errno == (28 if which == "errno" else None)
        if theirs == "RuntimeError":
            assert mine in message


def test_a_failure_of_rank_0_alone_reaches_the_others_through_lead() -> None:
    kinds = [(kind, message) for kind, message, _ in ranks.run(2, jobs.fail, "lead", "key", 0)]
    assert kinds == [("KeyError", "'user'"), ("KeyError", "\"'user' (on rank 0)\"")]


def test_a_result_that_cannot_be_sent_raises_on_all_ranks() -> None:
    answers = ranks.run(2, jobs.unpicklable_result, 1)
    assert all("pickle" in message for _, message, _ in answers) and "on rank 1" in answers[0][1]


def test_a_process_alone_raises_its_own_errors_and_asks_nobody() -> None:
    alone = Ranks()
    assert alone.agree(lambda: 7) == [7] and alone.together(lambda: 7) == 7 and alone.lead(lambda: 7) == 7
    for call in (alone.agree, alone.together, alone.lead):
        with pytest.raises(ZeroDivisionError):
            call(lambda: 1 // 0)
    alone.share(None)
    with pytest.raises(KeyboardInterrupt):
        alone.share(KeyboardInterrupt())


def test_payloads_of_any_size_arrive_whole() -> None:
    sizes = [0, 1, 507, 508, 509, 1015, 1016, 1017, 100_003]
    for answer in ranks.run(3, jobs.gathered, sizes):
        assert answer == [[bytes([r]) * (size * (r + 1)) for r in range(3)] for size in sizes]


def test_messages_of_any_size_arrive_whole_whatever_order_they_are_waited_for_in() -> None:
    sizes = [97, 0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 7]
    assert ranks.run(3, jobs.exchanged, sizes) == [True, True, True]


def test_whole_cells_reach_their_owners_and_their_answers_come_back_in_place() -> None:
    sizes, owners = [[2, 1, 0, 3], [0, 7, 1, 1], [1, 1, 1, 0]], [0, 2, 0, 0]
    results = ranks.run(3, jobs.cells_there_and_back, sizes, owners)

    def keys(owner: int) -> list[tuple[int, int, int]]:
        cells = [(r, c) for r in range(3) for c in range(4) if owners[c] == owner]
        return [(r, c, i) for r, c in cells for i in range(sizes[r][c])]

    for rank, result in enumerate(results):
        by_sender = keys(rank)
        by_cell = sorted(by_sender, key=lambda key: (key[1], key[0], key[2]))
        assert result["owned"] == [1000 * r + 100 * c + i for r, c, i in by_cell]
        assert result["given"] == [1000 * r + 100 * c + i for r, c, i in by_sender]
        assert result["answered"]


@pytest.mark.parametrize("nbytes", [97, 3 * PIECE_BYTES + 7])
def test_an_exchange_that_nobody_waits_for_does_not_hold_up_the_next(nbytes: int) -> None:
    assert ranks.run(2, jobs.forgotten, nbytes, group_timeout=20.0) == [[8], [8]]


def test_rows_of_all_ranks_come_in_the_order_of_the_ranks() -> None:
    whole = np.repeat(np.float32([1, 2]), [97, 194])[:, None].repeat(3, 1)
    for rows in ranks.run(3, jobs.gathered_rows, 97):
        np.testing.assert_array_equal(rows, whole)


def test_a_failure_leaves_no_cycle_that_keeps_its_rows() -> None:
    assert ranks.run(2, jobs.kept_alive_by_a_failure) == [False, False]


def test_groups_of_our_own_have_the_timeout_of_the_group_they_accompany() -> None:
    answers = ranks.run(3, jobs.own_timeouts, group_timeout=77.0)
    assert answers == [[77.0, 77.0, 55.0], [77.0, 77.0, 55.0], [77.0, 77.0]]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("world, absentees", [(2, [1]), (3, [0]), (3, [2]), (3, [0, 1])])
def test_a_call_that_some_ranks_never_make_fails_within_the_timeout_and_names_them(
    world: int, absentees: list[int], fresh: bool
) -> None:
    answers = ranks.run(world, jobs.absent, absentees, fresh, group_timeout=1.0)
    named = f"rank{'s' if len(absentees) > 1 else ''} {', '.join(map(str, absentees))} ended or did not take"
    for rank, (kind, message, seconds) in enumerate(answers):
        if rank not in absentees:
            assert kind == "RankError" and named in message, message
            assert "state_dict() should be called by every rank" in message
            assert seconds < 20  # 1 s, the grace of 2 s, and a busy machine


def test_ranks_in_different_calls_are_told_so() -> None:
    answers = ranks.run(2, jobs.different_calls)
    assert answers[0][:2] == ("RankError", "dump() should be called by every rank but rank 1 is in load()")
    assert answers[1][:2] == ("RankError", "load() should be called by every rank but rank 0 is in dump()")


def test_a_failure_that_no_exchange_carries_is_named_by_those_who_wait_in_vain() -> None:
    answers = ranks.run(2, jobs.reported, group_timeout=1.0)
    assert answers[0][:2] == ("OSError", "the store of this rank is full (on rank 1)")


def test_the_others_raise_when_a_rank_is_killed(tmp_path: Path) -> None:
    # Processes of their own: those of the pool are still needed.
    script = "import sys; from distributed import jobs; jobs.killed(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    started: list[Any] = []
    try:
        for rank in range(3):
            command = [sys.executable, "-c", script, str(rank), str(tmp_path)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == -9
    for rank in (0, 2):
        assert outputs[rank].startswith("RankError a training step should be called by every rank but rank 1")
        assert float(outputs[rank].split()[-2]) < 20
