"""How well a model predicts when its tables have fewer rows than there are ids: MovieLens 100k.

    make movielens        # or: python -m benchmarks.movielens [--shares 20,5] [--only native] [--seeds 1]

943 people and 1,682 films, two tables of 16 components, a small network over both, three shuffled epochs
over 80 % of the ratings; the AUC of "rated 4 or 5" over the rest. A table has room for 100, 50, 20, 10 or 5 %
of its ids; a shared row counts as one of them.

    torch       hashed       the hashing trick: row = id % rows
                oracle       own rows for the most frequent ids of the training set, which one knows only
                             afterwards, and one trained row for all others
    native      default      embstore.Embedding(16, max_capacity=rows)
                ...          its options by name
    dynamicemb  default      DynamicEmbTableOptions(dim=16, max_capacity=rows)
                ...

`no_eviction` keeps to no budget: it grows, so its AUC is that of all ids.

Prints a table and writes build/movielens.json and build/movielens.svg.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from .movielens_data import load

SHARES = (100, 50, 20, 10, 5)  # percent
SEEDS = 3
DIM, BATCH, EPOCHS = 16, 256, 3
TABLE_LR, DENSE_LR, INITIAL = 0.2, 1e-3, 0.1  # the best for a row for every id
BUCKET = 16  # the smallest table of dynamicemb has 47 rows, and it has at least one bucket
OUT = Path("build")

# Options of embstore.TableOptions by the name of the strategy.
FOREVER = 10**6  # batches: a half-life that never comes, since shuffled epochs do not drift
NATIVE: dict[str, dict[str, Any]] = {
    "default": {},
    "timestamp": {"score_strategy": "timestamp"},
    "timestamp_shared": {"score_strategy": "timestamp", "shared_rows": 1},
    "lfu": {"score_strategy": "lfu"},
    "lfu_shared": {"score_strategy": "lfu", "shared_rows": 1},
    "frequency": {
        "score_strategy": "lfu",
        "admission": "frequency",
        "shared_rows": 1,
        "half_life": FOREVER,
    },
    "importance": {"score_strategy": "importance", "admission": "frequency", "shared_rows": 1},
    "no_eviction": {"score_strategy": "no_eviction"},
}
# Options of dynamicemb.DynamicEmbTableOptions; the score strategy is named as in its enumeration.
DYNAMICEMB: dict[str, dict[str, Any]] = {
    "default": {},
    "lfu": {"score_strategy": "LFU"},
    "frequency": {
        "score_strategy": "LFU",
        "admission": "frequency",
        "shared_rows": 1,
        "half_life": FOREVER,
    },
    "no_eviction": {"score_strategy": "NO_EVICTION"},
}
STRATEGIES = {"torch": ["hashed", "oracle"], "native": list(NATIVE), "dynamicemb": list(DYNAMICEMB)}


@dataclass(frozen=True)
class Run:
    """One training. rows: of the table of users and of that of items, at its end."""

    share: int
    package: str
    strategy: str
    seed: int
    auc: float = 0.0
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Ratings:
    """Of one seed, ids of (users, items) in two columns."""

    train: np.ndarray
    train_liked: np.ndarray
    test: np.ndarray
    test_liked: np.ndarray
    ids: tuple[int, int]  # how many there are


def ratings(seed: int) -> Ratings:
    users, items, stars, _ = load()
    ids = np.stack([users, items], 1)
    liked = (stars >= 4).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(ids))
    train, test = np.split(order, [len(ids) * 4 // 5])
    counts = (len(np.unique(users)), len(np.unique(items)))
    return Ratings(ids[train], liked[train], ids[test], liked[test], counts)


def auc(scores: np.ndarray, liked: np.ndarray) -> float:
    """The chance that a rating of 4 or 5 is ranked above a lower one."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = liked > 0.5
    n1, n0 = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def rows_of(share: int, ids: int) -> int:
    return max(ids * share // 100, 1)


def own_rows(share: int, ids: int, shared_rows: int) -> int:
    """The capacity of a table whose shared rows count; where all ids fit, nothing uses them."""
    return ids if share >= 100 else rows_of(share, ids) - shared_rows


def rows_in(table: Any) -> int:
    return len(table) + len(table.shared_rows())


# ---- tables: each maker returns a module of ids (n, 2) -> vectors (n, 2 * DIM)


def make_torch(strategy: str, data: Ratings, share: int) -> Any:
    import torch

    class Mapped(torch.nn.Module):
        """A static table of so many rows for each column, and the row of every id."""

        def __init__(self) -> None:
            super().__init__()
            sizes = [rows_of(share, n) for n in data.ids]
            self.rows = [self._rows(column, size) for column, size in enumerate(sizes)]
            self.tables = torch.nn.ModuleList(torch.nn.Embedding(size, DIM) for size in sizes)
            for table in self.tables:
                torch.nn.init.uniform_(table.weight, -INITIAL, INITIAL)

        def _rows(self, column: int, size: int) -> torch.Tensor:
            highest = int(max(data.train[:, column].max(), data.test[:, column].max()))
            if strategy == "hashed" or size >= data.ids[column]:  # then every id has its own
                return torch.arange(highest + 1) % size
            counts = np.bincount(data.train[:, column], minlength=highest + 1)
            rows = np.full(highest + 1, size - 1)  # the shared one
            rows[np.argsort(-counts, kind="stable")[: size - 1]] = np.arange(size - 1)
            return torch.from_numpy(rows)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            columns = zip(self.tables, self.rows, ids.unbind(1), strict=True)
            return torch.cat([table(rows[column]) for table, rows, column in columns], 1)

        def sizes(self) -> tuple[int, int]:
            return self.tables[0].num_embeddings, self.tables[1].num_embeddings

    return Mapped()


def make_native(strategy: str, data: Ratings, share: int) -> Any:
    import torch

    import embstore

    # The default of a module with a limit has one.
    shared = 1 if strategy == "default" else NATIVE[strategy].get("shared_rows", 0)

    class Native(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torch.nn.ModuleList(
                embstore.Embedding(
                    DIM,
                    name=name,
                    optimizer=embstore.Adagrad(lr=TABLE_LR),
                    initializer=embstore.Uniform(-INITIAL, INITIAL),
                    max_capacity=own_rows(share, n, shared),
                    **NATIVE[strategy],
                )
                for name, n in zip(("user", "item"), data.ids, strict=True)
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            columns = zip(self.tables, ids.unbind(1), strict=True)
            return torch.cat([table(column) for table, column in columns], 1)

        def sizes(self) -> tuple[int, int]:
            return rows_in(self.tables[0].table), rows_in(self.tables[1].table)

    return Native()


def make_dynamicemb(strategy: str, data: Ratings, share: int) -> Any:
    import torch

    import dynamicemb
    from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTables

    def options(ids: int) -> Any:
        keywords = dict(DYNAMICEMB[strategy])
        if "score_strategy" in keywords:
            keywords["score_strategy"] = dynamicemb.DynamicEmbScoreStrategy[keywords["score_strategy"]]
        return dynamicemb.DynamicEmbTableOptions(
            dim=DIM,
            max_capacity=own_rows(share, ids, keywords.get("shared_rows", 0)),
            bucket_capacity=BUCKET,
            initializer_args=dynamicemb.DynamicEmbInitializerArgs(
                dynamicemb.DynamicEmbInitializerMode.UNIFORM, lower=-INITIAL, upper=INITIAL
            ),
            **keywords,
        )

    class Faced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = BatchedDynamicEmbeddingTables(
                [options(n) for n in data.ids],
                ["user", "item"],
                optimizer=dynamicemb.EmbOptimType.EXACT_ADAGRAD,
                learning_rate=TABLE_LR,
                eps=1e-10,
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tables(ids.t().reshape(-1), torch.arange(ids.numel() + 1))

        def sizes(self) -> tuple[int, int]:
            users, items = self.tables.dynamic_tables.values()
            return rows_in(users.table), rows_in(items.table)

    return Faced()


MAKERS: dict[str, Callable[[str, Ratings, int], Any]] = {
    "torch": make_torch,
    "native": make_native,
    "dynamicemb": make_dynamicemb,
}


def use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def train(run: Run) -> Run:
    """Trains and measures."""
    import torch

    torch.manual_seed(run.seed)
    data = ratings(run.seed)
    tables = MAKERS[run.package](run.strategy, data, run.share)
    torch.manual_seed(run.seed)  # the network starts alike, whatever the tables drew
    network = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(network.parameters(), lr=DENSE_LR)]
    if run.package == "torch":
        optimizers.append(torch.optim.Adagrad(tables.parameters(), lr=TABLE_LR))
    ids, liked = torch.from_numpy(data.train), torch.from_numpy(data.train_liked)
    rng = np.random.default_rng(run.seed)
    for _ in range(EPOCHS):
        order = torch.from_numpy(rng.permutation(len(ids)))
        for batch in order.split(BATCH):
            logits = network(tables(ids[batch]))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, liked[batch]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    tables.eval()
    with torch.no_grad():
        scores = network(tables(torch.from_numpy(data.test)))[:, 0].numpy()
    measured = auc(scores, data.test_liked)
    return Run(run.share, run.package, run.strategy, run.seed, round(measured, 5), tables.sizes())


# ---- output


def mean(runs: list[Run], share: int, package: str, strategy: str) -> float | None:
    found = [r.auc for r in runs if (r.share, r.package, r.strategy) == (share, package, strategy)]
    return float(np.mean(found)) if found else None


def table_of(runs: list[Run]) -> str:
    """Markdown: a line for each strategy, a column for each share."""
    shares = sorted({run.share for run in runs}, reverse=True)
    lines = [
        "| AUC, rows as a share of the ids | " + " | ".join(f"{share} %" for share in shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    for package, strategy in dict.fromkeys((run.package, run.strategy) for run in runs):
        means = [mean(runs, share, package, strategy) for share in shares]
        cells = " | ".join("" if value is None else f"{value:.3f}" for value in means)
        lines.append(f"| {package} {strategy} | {cells} |")
    return "\n".join(lines)


def plot(runs: list[Run], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "embstore"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    styles = {"torch": "--", "native": "-", "dynamicemb": ":"}
    shares = sorted({run.share for run in runs}, reverse=True)
    for package, strategy in dict.fromkeys((run.package, run.strategy) for run in runs):
        means = [mean(runs, share, package, strategy) for share in shares]
        axes.plot(shares, means, styles[package], marker="o", markersize=3, label=f"{package} {strategy}")
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share} %" for share in shares])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("rows, as a share of the ids")
    axes.set_ylabel("AUC (mean of the seeds)")
    axes.set_title("MovieLens 100k: prediction under a budget of rows")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def report(runs: list[Run], folder: Path) -> None:
    """Prints the table and writes the runs and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "movielens.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    plot(runs, folder / "movielens.svg")
    print(table_of(runs))
    print(f"\nwritten: {folder / 'movielens.json'}, {folder / 'movielens.svg'}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.movielens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="percent, such as 20,5")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--only", default="", help="names of packages or strategies, such as native,hashed")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of movielens.json and movielens.svg")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[Run]:
    from tqdm import tqdm

    options = parse(arguments)
    only = [name for name in options.only.split(",") if name]
    known = {*STRATEGIES, *(name for names in STRATEGIES.values() for name in names)}
    for name in only:
        if name not in known:
            raise SystemExit(
                f"--only should name packages or strategies among {sorted(known)} but is: {name}"
            )
    wanted = [
        Run(int(share), package, strategy, seed)
        for package, strategies in STRATEGIES.items()
        for strategy in strategies
        for share in options.shares.split(",")
        for seed in range(options.seeds)
        if not only or package in only or strategy in only
    ]
    load()  # fetches the ratings once, before the processes want them
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("EMBSTORE_NUM_THREADS", "1")
    done: list[Run] = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), use_one_thread) as pool:
        runs = [pool.submit(train, run) for run in wanted]
        with tqdm(as_completed(runs), total=len(runs), unit="training", mininterval=1.0) as progress:
            for future in progress:
                done.append(future.result())
    done.sort(key=lambda run: wanted.index(Run(run.share, run.package, run.strategy, run.seed)))
    report(done, options.out)
    return done


if __name__ == "__main__":
    main()
