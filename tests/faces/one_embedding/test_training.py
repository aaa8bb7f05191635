"""Training with plain torch.optim, against a dense table in which only the touched rows move."""

import numpy as np
import pytest
import torch

import one_embedding as oe

DIM = 6


def uniform(bound=0.1):
    return oe.make_table_options(oe.make_uniform_initializer(low=-bound, high=bound))


def make(tmp_path, name, size_factor=1, kind="ssd", tables=None, dim=DIM, **options):
    path = str(tmp_path / name)
    store = {
        "ssd": lambda: oe.make_cached_ssd_store_options(1, path, size_factor=size_factor),
        "device": lambda: oe.make_device_mem_store_options(path, 100_000, size_factor=size_factor),
        "host": lambda: oe.make_cached_host_mem_store_options(1, path, 100_000, size_factor=size_factor),
    }[kind]()
    return oe.MultiTableEmbedding(
        name, dim, torch.float, torch.int64, tables or [uniform()], store, **options
    )


OPTIMIZERS = {
    "sgd": (1, lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd-decay": (1, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, maximize=True)),
    "momentum": (2, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (2, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "dampening": (2, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3)),
    "adam": (3, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam-decay": (3, lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-5)),
    "adagrad": (2, lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2)),
}


@pytest.mark.parametrize("kind", ["ssd", "device"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_move_as_in_a_dense_table_whose_rows_are_all_touched(tmp_path, name, kind):
    size_factor, optimizer_of = OPTIMIZERS[name]
    embedding = make(tmp_path, "e", size_factor, kind)
    ids = torch.arange(20) * 7919 - 30_000
    dense = torch.nn.Embedding.from_pretrained(embedding.eval()(ids).clone(), freeze=False)
    embedding.train()
    ours, theirs = optimizer_of(embedding.parameters()), optimizer_of(dense.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, theirs)]
    torch.manual_seed(0)
    for _ in range(6):
        rows = torch.cat([torch.arange(20), torch.randint(0, 20, (13,))])  # all, some of them twice
        target = torch.randn(33, DIM)
        for module, keys, optimizer in ((embedding, ids[rows], ours), (dense, rows, theirs)):
            optimizer.zero_grad()
            (module(keys) * target).sum().backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(embedding.eval()(ids), dense.weight.detach(), rtol=2e-5, atol=2e-6)


def test_ftrl_follows_its_formula_for_rows_and_for_dense_parameters(tmp_path):
    numbers = dict(lr=0.1, weight_decay=0.01, lr_power=0.5, lambda1=0.01, lambda2=0.02, beta=0.1)
    embedding = make(tmp_path, "e", 3)
    ids = torch.arange(12)
    first = embedding.eval()(ids).clone()
    embedding.train()
    dense = torch.nn.Parameter(first.clone())
    optimizer = oe.Ftrl([*embedding.parameters(), dense], **numbers)
    w, n, z = first.double().numpy(), np.full((12, DIM), 0.1), np.zeros((12, DIM))
    rng = np.random.default_rng(0)
    for _ in range(5):
        g = rng.standard_normal((12, DIM))
        optimizer.zero_grad()
        gradient = torch.from_numpy(g).float()
        ((embedding(ids) * gradient).sum() + (dense * gradient).sum()).backward()
        optimizer.step()
        m = n + g**2
        z = z + g - (m**0.5 - n**0.5) / 0.1 * w
        moved = (np.sign(z) * 0.01 - z) / ((0.1 + m**0.5) / 0.1 + 0.02)
        w, n = np.where(np.abs(z) < 0.01, 0, moved) - 0.1 * 0.01 * w, m
    np.testing.assert_allclose(embedding.eval()(ids).numpy(), w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dense.detach().numpy(), w, rtol=1e-4, atol=1e-6)


def test_gradients_of_several_forwards_add_up_until_a_step(tmp_path):
    a, b = make(tmp_path, "a"), make(tmp_path, "b")
    one, two = (torch.optim.SGD(e.parameters(), lr=0.1) for e in (a, b))
    x, y = torch.tensor([1, 2, 2]), torch.tensor([2, 3])
    a(x).sum().backward()
    a(y).sum().backward()
    one.step()
    b(torch.cat([x, y])).sum().backward()
    two.step()
    ids = torch.arange(5)
    torch.testing.assert_close(a.eval()(ids), b.eval()(ids))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_is_pending_and_may_come_before_backward(tmp_path, set_to_none):
    embedding = make(tmp_path, "e")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([1, 2])
    before = embedding(ids).detach().clone()
    embedding(ids).sum().backward()
    loss = embedding(torch.tensor([2])).sum()
    optimizer.zero_grad(set_to_none)
    loss.backward()
    optimizer.step()
    after = embedding.eval()(ids)
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[1], before[1] - 1.0)


def test_a_scaler_and_clipping_scale_the_rows_gradients_with_the_rest(tmp_path):
    embedding = make(tmp_path, "e")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    ids = torch.tensor([1])
    before = embedding.eval()(ids).clone()
    embedding.train()
    (embedding(ids).sum() * 4).backward()
    for parameter in embedding.parameters():
        parameter.grad.mul_(0.25)
    optimizer.step()
    torch.testing.assert_close(embedding.eval()(ids), before - 1.0)


def test_an_untrained_forward_then_the_first_step_of_an_optimizer_with_a_first_accumulator(tmp_path):
    embedding = make(tmp_path, "e", 2)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=1.0, initial_accumulator_value=3.0)
    ids = torch.tensor([5])
    before = embedding(ids).detach().clone()
    embedding(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding.eval()(ids), before - 1.0 / (2.0 + 1e-10))


def test_optimizers_that_are_not_ours_are_refused_before_anything_moves(tmp_path):
    embedding = make(tmp_path, "e", 3)
    dense = torch.nn.Parameter(torch.ones(1))
    for kind, reason in ((torch.optim.AdamW, "AdamW"), (torch.optim.RMSprop, "RMSprop")):
        optimizer = kind([*embedding.parameters(), dense], lr=0.1)
        (embedding(torch.tensor([1])).sum() + dense.sum()).backward()
        with pytest.raises(NotImplementedError, match=reason):
            optimizer.step()
    with pytest.raises(NotImplementedError, match="amsgrad"):
        torch.optim.Adam([*embedding.parameters(), dense], amsgrad=True).step()
    assert dense.item() == 1.0
    with pytest.raises(NotImplementedError, match="RMSprop"):
        oe.Optimizer(torch.optim.RMSprop([dense]), [embedding])


@pytest.mark.parametrize(
    ("size_factor", "optimizer_of", "right"),
    [
        (1, lambda p: torch.optim.Adam(p), 3),
        (3, lambda p: torch.optim.SGD(p, lr=0.1), 1),
        (4, lambda p: torch.optim.Adam(p), 3),
        (1, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), 2),
        (2, lambda p: oe.Ftrl(p), 3),
    ],
)
def test_a_wrong_size_factor_is_refused_with_the_right_one(tmp_path, size_factor, optimizer_of, right):
    embedding = make(tmp_path, "e", size_factor)
    optimizer = optimizer_of(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=rf"size_factor of embedding 'e' should be {right} "):
        optimizer.step()


def test_the_wrapper_trains_embeddings_that_its_optimizer_does_not_hold(tmp_path):
    a, b = make(tmp_path, "a", 3), make(tmp_path, "b", 3)
    dense = torch.nn.Parameter(torch.ones(1))
    wrapper = oe.Optimizer(torch.optim.Adam([dense], lr=0.1), [a])
    plain = torch.optim.Adam(b.parameters(), lr=0.1)
    ids = torch.arange(7)
    for _ in range(4):
        wrapper.zero_grad()
        plain.zero_grad()
        ((a(ids) ** 2).sum() + dense.sum()).backward()
        (b(ids) ** 2).sum().backward()
        wrapper.step()
        plain.step()
    torch.testing.assert_close(a.eval()(ids), b.eval()(ids))


def test_several_embeddings_in_one_model_train_with_one_optimizer(tmp_path):
    a, b = make(tmp_path, "a", 3), make(tmp_path, "b", 3, kind="host")
    model = torch.nn.ModuleList([a, b, torch.nn.Linear(DIM, 1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ids = torch.arange(40)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((model[2](a(ids) + b(ids)).squeeze() - (ids % 2)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_the_example_of_the_document_trains(tmp_path):
    tables = [
        oe.make_table_options(oe.make_uniform_initializer(low=-bound, high=bound))
        for bound in (0.1, 0.05, 0.15)
    ]
    store_options = oe.make_cached_ssd_store_options(
        cache_budget_mb=8142,
        persistent_path=str(tmp_path),
        capacity=40000000,
        size_factor=1,
        physical_block_size=4096,
    )
    embedding_size = 128
    embedding = oe.MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=embedding_size,
        dtype=torch.float,
        key_type=torch.int64,
        tables=tables,
        store_options=store_options,
    )
    embedding.to("cpu")
    num_tables = 3
    layers = [torch.nn.Linear(embedding_size * num_tables, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    mlp = torch.nn.Sequential(*layers)
    optimizers = [
        torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.0),
        torch.optim.SGD(mlp.parameters(), lr=0.01, momentum=0.0),
    ]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, (50, num_tables)))
    losses = []
    for _ in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (mlp(torch.reshape(embedding(ids), (-1, num_tables * embedding_size))) ** 2 - 1).abs().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_batch_larger_than_the_cache_and_a_cache_smaller_than_the_table_are_exact(tmp_path):
    # 1 MB holds 10,922 rows of 96 bytes.
    cached, whole = make(tmp_path, "a", 3, dim=8), make(tmp_path, "b", 3, kind="device", dim=8)
    optimizers = [torch.optim.Adam(e.parameters(), lr=0.05) for e in (cached, whole)]
    torch.manual_seed(1)
    for size in (7000, 30_000, 5000, 5000, 5000, 5000, 5000):
        ids = torch.randint(-60_000, 60_000, (size,))
        for embedding, optimizer in zip((cached, whole), optimizers):
            optimizer.zero_grad()
            (embedding(ids) ** 2).sum().backward()
            optimizer.step()
    assert cached.table.stats().write_backs > 0
    ids = torch.arange(-60_000, 60_000)
    assert torch.equal(cached.eval()(ids), whole.eval()(ids))


def smart_embedding(path, name, dim, kind="ssd"):
    width = (3 * dim * 4 + 7) // 8 * 2 + 2  # as the original wants it
    if kind == "ssd":
        store = oe.make_cached_ssd_store_options(1, str(path / name), storage_dim=width)
    else:
        store = oe.make_device_mem_store_options(str(path / name), 100_000, storage_dim=width)
    return oe.MultiTableEmbedding(name, dim, torch.float, torch.int64, [uniform()], store)


@pytest.mark.parametrize("kind", ["ssd", "device"])
@pytest.mark.parametrize("dim", [6, 7])
@pytest.mark.parametrize("held", [True, False])
def test_smart_decay_adam_makes_up_for_the_steps_in_which_a_row_had_no_gradient(tmp_path, dim, kind, held):
    embedding = smart_embedding(tmp_path, "e", dim, kind)
    dense = torch.nn.Parameter(torch.ones(3))
    twin = torch.nn.Parameter(torch.ones(3))
    parameters = [*embedding.parameters(), dense] if held else [dense]
    numbers = dict(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.01)
    optimizer = oe.SmartDecayAdam(parameters, lr=0.1, **numbers)
    stepper = optimizer if held else oe.Optimizer(optimizer, [embedding])
    plain = torch.optim.Adam([twin], lr=0.1, **numbers)
    ids = torch.arange(10) * 7919 - 30_000
    w = embedding.eval()(ids).double().numpy().copy()
    embedding.train()
    m, v, last = np.zeros((10, dim)), np.zeros((10, dim)), np.zeros(10, np.int64)
    rng = np.random.default_rng(0)
    for t in range(1, 16):
        rows = rng.integers(0, 10, 4)  # some of them twice, most of them not at all
        g = rng.standard_normal((4, dim)).astype(np.float32)
        stepper.zero_grad()
        plain.zero_grad()
        ((embedding(ids[rows]) * torch.from_numpy(g)).sum() + (dense**2).sum()).backward()
        (twin**2).sum().backward()
        stepper.step()
        plain.step()
        for row in np.unique(rows):
            summed = g[rows == row].astype(np.float64).sum(0) + 0.01 * w[row]
            k = t - last[row]
            caught_up = m[row] * sum(0.8**j for j in range(1, k))
            m[row] = 0.8**k * m[row] + 0.2 * summed
            v[row] = 0.95**k * v[row] + 0.05 * summed**2
            w[row] -= 0.1 * (m[row] + caught_up) / (np.sqrt(v[row]) + 1e-4)
            last[row] = t
    np.testing.assert_allclose(embedding.eval()(ids).numpy(), w, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense, twin)


def test_smart_decay_adam_goes_on_from_a_snapshot(tmp_path):
    embedding, twin = smart_embedding(tmp_path, "e", 5), smart_embedding(tmp_path, "twin", 5)
    ids = torch.arange(8)

    def train(embedding, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            (embedding(ids[step % 3 :: 3]) * (step + 1.0)).square().sum().backward()
            optimizer.step()

    optimizer, other = (oe.SmartDecayAdam(e.parameters(), lr=0.1) for e in (embedding, twin))
    train(twin, other, range(12))
    train(embedding, optimizer, range(7))
    embedding.save_snapshot("seven")
    state = optimizer.state_dict()
    embedding.close()
    embedding = smart_embedding(tmp_path, "e", 5)
    embedding.load_snapshot("seven")
    optimizer = oe.SmartDecayAdam(embedding.parameters(), lr=0.5)
    optimizer.load_state_dict(state)
    train(embedding, optimizer, range(7, 12))
    found, expected = embedding.table.read(ids), twin.table.read(ids)
    assert found.values.tobytes() == expected.values.tobytes()
    assert found.states.tobytes() == expected.states.tobytes()
    floats = found.values.shape[1] + found.states.shape[1]
    embedding.save_snapshot("twelve")
    embedding.close()
    folder = str(tmp_path / "e" / "0-1")
    with oe.make_persistent_table_reader([folder], "twelve", np.int64, np.float32, floats) as reader:
        keys, rows = next(reader)
    # The last step of a row is an int64 behind its padded columns.
    steps = dict(zip(keys.tolist(), rows[:, 16:].copy().view(np.int64)[:, 0].tolist()))
    assert steps == {i: (10, 11, 12)[i % 3] for i in range(8)}


@pytest.mark.parametrize("option", ["amsgrad", "decoupled_weight_decay"])
def test_smart_decay_adam_refuses_what_its_rule_has_not(tmp_path, option):
    embedding = smart_embedding(tmp_path, "e", 4)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = oe.SmartDecayAdam(embedding.parameters(), **{option: True})
    with pytest.raises(NotImplementedError, match=option):
        optimizer.step()


def test_a_storage_dim_that_does_not_fit_smart_decay_adam_is_told_with_the_right_one(tmp_path):
    embedding = make(tmp_path, "e", 3)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="storage_dim of embedding 'e' should be 20 for SmartDecayAdam"):
        oe.SmartDecayAdam(embedding.parameters()).step()
