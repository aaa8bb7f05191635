"""Several ranks see the vectors of one process, and snapshots move between numbers of ranks."""

import textwrap

import forked_programs
import pytest

SCRIPT = textwrap.dedent(
    """
    import os, sys
    import torch, torch.distributed as dist
    import one_embedding as oe
    from datetime import timedelta

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece

    path, mode = sys.argv[1], sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 if mode == "alone" else 60))
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = [oe.make_table(oe.make_uniform_initializer(-b, b)) for b in (0.1, 0.3)]
    embedding = oe.MultiTableEmbedding(
        "e", 4, torch.float, torch.int64, tables,
        oe.make_cached_ssd_store_options(1, path, size_factor=3), padding_idx=3)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    if mode == "train":
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            ids = torch.randint(-50, 50, (24, 2), generator=generator)
            target = torch.randn(24, 2, 4, generator=generator)
            part = slice(24 * rank // world, 24 * (rank + 1) // world)
            optimizer.zero_grad()
            ((embedding(ids[part]) - target[part]) ** 2).sum().backward()
            # All ranks clip alike, by the norm of the gradients of all rows.
            norm = torch.nn.utils.clip_grad_norm_(embedding.parameters(), 2.0)
            everyone = [torch.zeros(()) for _ in range(world)]
            dist.all_gather(everyone, norm)
            assert norm > 2 and all(torch.equal(norm, other) for other in everyone)
            optimizer.step()
        embedding.save_snapshot("s")
    elif mode == "fail":
        try:
            embedding(torch.arange(2) if rank else torch.arange(2.0))
        except (TypeError, RuntimeError) as error:
            say("rank", rank, type(error).__name__, "named" * ("on rank 0" in str(error)))
        embedding(torch.arange(2))
        if rank == 1:
            embedding.store.close()
        for training in (True, False):
            try:
                embedding.train(training)(torch.arange(100, 140))
            except RuntimeError as error:
                say("rank", rank, "training" if training else "evaluation", "on rank 1" in str(error))
        try:
            oe.MultiTableEmbedding(
                "f", 4, torch.float, torch.int64, tables,
                oe.make_cached_ssd_store_options(1, "/proc/no" if rank else path + "2", size_factor=3))
        except OSError as error:
            say("rank", rank, "construction", "on rank 1" in str(error))
        try:
            embedding.load_snapshot("nothing")
        except FileNotFoundError as error:
            say("rank", rank, "no snapshot")
        dist.destroy_process_group()
        sys.exit()
    elif mode == "alone":
        if rank == 0:
            try:
                embedding.state_dict()
            except RuntimeError as error:
                say("rank 0:", error)
        else:  # goes on training
            try:
                optimizer.zero_grad()
                embedding(torch.arange(2)).sum().backward()
            except RuntimeError as error:
                say("rank", rank, "step:", error)
        sys.exit()
    else:
        embedding.load_snapshot("s")
    embedding.eval()
    out = embedding(torch.arange(-60, 60).view(-1, 2))
    if rank == 0:
        torch.save(out, sys.argv[3])
    dist.destroy_process_group()
    """
)


def run(tmp_path, world, *arguments):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    return forked_programs.run([script, *arguments], ranks=world, needs=["one_embedding"], seconds=100)


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_two_ranks_train_what_one_process_trains_and_snapshots_load_on_one_and_three(tmp_path):
    import torch

    run(tmp_path, 1, tmp_path / "one", "train", tmp_path / "one.pt")
    run(tmp_path, 2, tmp_path / "two", "train", tmp_path / "two.pt")
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    for world in (1, 3):
        run(tmp_path, world, tmp_path / "two", "load", tmp_path / "loaded.pt")
        assert torch.equal(torch.load(tmp_path / "loaded.pt"), two)


@pytest.mark.multirank
def test_a_rank_that_fails_makes_all_ranks_raise(tmp_path):
    out = run(tmp_path, 2, tmp_path / "store", "fail")
    assert "rank 0 TypeError \n" in out and "rank 1 TypeError named" in out
    for where in ("training", "evaluation", "construction"):
        assert f"rank 0 {where} True" in out and f"rank 1 {where} False" in out, out
    assert out.count("no snapshot") == 2


@pytest.mark.multirank
def test_a_state_dict_that_only_rank_0_asks_for_fails_within_the_timeout_and_says_so(tmp_path):
    out = run(tmp_path, 2, tmp_path / "store", "alone")
    assert "rank 0: state_dict() should be called by every rank but rank 1 ended or did not take part" in out
    assert "within 2 s" in out
    assert "rank 1 step: forward() and backward() of an embedding should be called by every rank" in out
