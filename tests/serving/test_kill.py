"""kill -9 of the trainer and of readers at any moment: no reader ever shows anything but a whole state.

`python -m trust.kills --kind serving` is the long run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import kill_rounds

ROUNDS = 12


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(180 + 10 * ROUNDS)
def test_readers_show_whole_states_though_everybody_is_killed(tmp_path: Path) -> None:
    assert kill_rounds.run(tmp_path, ROUNDS, seed=5) >= 1
