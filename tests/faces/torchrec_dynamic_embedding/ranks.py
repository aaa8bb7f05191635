"""What ranks do in the tests, each in a process of its own: `ranks.py ROLE ARGUMENTS-AS-JSON`."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

import forked_programs  # noqa: E402


def launch(role, *arguments, world=1, seconds=110):
    """Runs a role on `world` ranks, all of which have to succeed."""
    program = [__file__, role, json.dumps(arguments)]
    forked_programs.run(program, ranks=world, needs=["torchrec_dynamic_embedding"], seconds=seconds)


def in_a_new_interpreter(role, *arguments, seconds):
    """The exit code of a role in a process that no other was forked for, and its output."""
    done = subprocess.run(
        [sys.executable, __file__, role, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout


# ---- roles: what a rank does


def twins(where):
    """All shardings, optimizers and depths, each with its own prefix."""
    from faces.torchrec_dynamic_embedding.twins import compare

    number = 0
    for sharding in ("row_wise", "table_wise", "column_wise"):
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
            for depth in (0, 1, 4):
                number += 1
                layout = "packed" if number % 2 else "compatible"
                compare(
                    f"redis://{where}/?prefix=twins{number}&layout={layout}",
                    kind="ec" if number % 3 == 0 else "ebc",
                    sharding=sharding,
                    optimizer=optimizer,
                    num_prefetch=depth,
                    steps=8,
                )


def taken_ahead(where):
    """Two batches ahead, with windows that have just room for them; then with too little room."""
    from faces.torchrec_dynamic_embedding.twins import compare

    for number, depth in enumerate((0, 2)):
        url = f"redis://{where}/?layout=packed&prefix=ahead{number}"
        sharding = ("row_wise", "table_wise")[number]
        compare(url, sharding=sharding, num_prefetch=depth, steps=20, window=160, taken=2)
        try:
            compare(f"{url}-small", sharding=sharding, num_prefetch=depth, steps=20, window=64, taken=2)
        except RuntimeError as error:
            assert "of the batches in flight" in str(error), str(error)
        else:
            raise AssertionError("three batches do not fit 64 rows")


def failing_rank(where):
    """Rank 1's loader raises in mid-epoch; afterwards a new epoch works, and so do uneven ends and breaks."""
    import torch.distributed as dist
    from faces.torchrec_dynamic_embedding.models import batches, trainer
    from faces.torchrec_dynamic_embedding.twins import loader_of, train

    import torchrec_dynamic_embedding as tde

    class Loader:
        fails_at, steps = None, 6

        def __iter__(self):
            for step, batch in enumerate(loader_of(data[: self.steps])):
                if step == self.fails_at:
                    raise LookupError("the disk is gone")
                yield batch

    rank = dist.get_rank()
    data = batches(6, 400, rank=rank)
    ours, source = trainer(64), Loader()
    loader = tde.wrap(f"redis://{where}/?prefix=f", source, ours.model, {"emb": ours.configs}, num_prefetch=2)
    assert len(train(ours, loader)) == 6
    source.fails_at = 3 if rank == 1 else None
    try:
        train(ours, loader)
    except LookupError as error:
        assert str(error) == ("the disk is gone" if rank == 1 else "the disk is gone (on rank 1)"), str(error)
    else:
        raise AssertionError("the failure of rank 1 should reach both ranks")
    source.fails_at = None
    assert len(train(ours, loader)) == 6
    for step, (label, kjt) in enumerate(loader):  # both ranks leave in mid-epoch
        ours.step(kjt, label)
        if step == 2:
            break
    tde.save(ours.model)
    assert len(train(ours, loader)) == 6
    source.steps = 4 if rank == 1 else 6
    try:
        train(ours, loader)
    except RuntimeError as error:
        assert "the loaders of ranks [1] ended first" in str(error), str(error)
    else:
        raise AssertionError("uneven loaders should raise on both ranks")


def interrupted(url, steps, state, losses):
    """Trains so many more steps from where another process stopped."""
    import torch
    from faces.torchrec_dynamic_embedding.models import batches, trainer
    from faces.torchrec_dynamic_embedding.twins import loader_of

    import torchrec_dynamic_embedding as tde

    ours = trainer(48)
    done = 0
    if Path(state).exists():
        kept = torch.load(state)
        done = kept["done"]
        ours.model.module.dense.load_state_dict(kept["dense"])
    data = batches(done + steps, 300, seed=5)[done:]
    loader = tde.wrap(url, loader_of(data), ours.model, {"emb": ours.configs}, num_prefetch=2)
    found = [ours.step(kjt, label) for label, kjt in loader]
    tde.save(ours.model)
    torch.save({"done": done + steps, "dense": ours.model.module.dense.state_dict()}, state)
    Path(losses).write_text(json.dumps(found))


def leaves_early(how):
    """Ends the process in the middle of an epoch, in several ways; the interpreter has to exit by itself."""
    import itertools

    from faces.torchrec_dynamic_embedding.models import batches, trainer
    from faces.torchrec_dynamic_embedding.twins import loader_of

    import torchrec_dynamic_embedding as tde

    ours = trainer(64)
    data = itertools.cycle(loader_of(batches(4, 200)))
    loader = tde.wrap("memory://leave", data, ours.model, {"emb": ours.configs}, num_prefetch=4)
    iterator = iter(loader)
    for _ in range(3):
        ours.step(*reversed(next(iterator)))
    if how == "raise":
        raise SystemExit(7)


if __name__ == "__main__":
    from faces.torchrec_dynamic_embedding.twins import start

    start()
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
