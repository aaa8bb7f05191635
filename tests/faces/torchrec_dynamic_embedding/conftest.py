import pytest
import redis_server
from faces.torchrec_dynamic_embedding import twins


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """One gloo rank: this process."""
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    twins.start()
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def redis(tmp_path_factory):
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    server = redis_server.RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def server(tmp_path):
    servers = []

    def start(*options):
        servers.append(redis_server.RedisServer(tmp_path / f"redis{len(servers)}", *options))
        return servers[-1].start()

    yield start
    for one in servers:
        one.stop()
