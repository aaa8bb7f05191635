"""What the demo shows while it trains: a line of 80 columns now and then, on a screen as in a file.

step      rows  hit rate   evicted  samples/s   dynamic  hashing      all
 100    65,536     91.8%    27,216    253,741    0.6091   0.5885   0.6092
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from examples.click_stream import auc
from examples.demo.models import Trainer

HEADER = (
    f"{'AUC of the next batches':>79}\n"
    "    step      rows  hit rate   evicted  samples/s   dynamic  hashing      all"
)


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Progress:
    """Collects what happened since the last line. Rank 0 prints it and writes it to metrics.jsonl.

    step, evicted  where the processes before these have stopped
    """

    def __init__(self, folder: Path, trainers: dict[str, Trainer], step: int = 0, evicted: int = 0) -> None:
        self.folder, self.trainers, self.step = folder, trainers, step
        self.before = self._counts()
        self.evicted = evicted - self.before["evictions"]
        self.kept: dict[str, list[np.ndarray]] = defaultdict(list)
        self._next_line()

    def _next_line(self) -> None:
        self.seconds, self.samples = 0.0, 0
        self.scores: dict[str, list[np.ndarray]] = defaultdict(list)

    def _counts(self) -> dict[str, int]:
        """Counters of the dynamic tables of all ranks."""
        stats = [t.table.stats() for t in self.trainers["dynamic"].dynamic]
        everything = self.trainers["all"].dynamic if "all" in self.trainers else []
        counts = {
            "rows": sum(s.size for s in stats),
            "bytes": sum(s.bytes for s in stats),
            "hits": sum(s.hits for s in stats),
            "misses": sum(s.inserts + s.refusals for s in stats),
            "evictions": sum(s.evictions for s in stats),
            "rows_all": sum(len(t.table) for t in everything),
        }
        total = torch.tensor(list(counts.values()))
        dist.all_reduce(total)
        return dict(zip(counts, total.tolist()))

    def line(self) -> None:
        counts = self._counts()
        mine = {name: np.concatenate(parts) for name, parts in self.scores.items()}
        of_ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        scores = {name: np.concatenate([part[name] for part in of_ranks]) for name in mine}
        aucs = {name: auc(scores[name], scores["clicks"]) for name in self.trainers}
        hits, misses = (counts[name] - self.before[name] for name in ("hits", "misses"))
        facts = {
            "step": self.step,
            "rows": counts["rows"],
            "rows_all": counts["rows_all"],
            "hit_rate": hits / max(1, hits + misses),
            "evictions": self.evicted + counts["evictions"],
            "samples_per_second": self.samples / max(self.seconds, 1e-9),
            "auc": aucs,
        }
        say(
            f"{self.step:8,}{facts['rows']:10,}{facts['hit_rate']:10.1%}{facts['evictions']:10,}"
            f"{facts['samples_per_second']:11,.0f} {''.join(f'{value:9.4f}' for value in aucs.values())}"
        )
        if dist.get_rank() == 0:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(facts) + "\n")
            for name, values in scores.items():
                self.kept[name].append(values)
        self.before = counts
        self._next_line()

    def save_scores(self) -> None:
        """Every prediction so far, and what came true of it."""
        if dist.get_rank() == 0:
            np.savez(self.folder / "scores.npz", **{k: np.concatenate(v) for k, v in self.kept.items()})
