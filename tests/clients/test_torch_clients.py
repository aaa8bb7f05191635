"""Programs that use one_embedding and torchrec_dynamic_embedding as their known clients do."""

from pathlib import Path

import forked_programs
import pytest
import redis_server

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(250)]


def _run(program, world, argument):
    output = forked_programs.run(
        [Path(__file__).with_name(program), argument],
        ranks=world,
        needs=["one_embedding", "torchrec_dynamic_embedding"],
        seconds=200,
    )
    assert output.count(f"of {world}: all well") == world, output[-6000:]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("program", ["one_embedding_deepfm.py", "one_embedding_dlrm.py"])
def test_a_client_of_one_embedding_trains_saves_restores_and_exports(program, world, tmp_path):
    _run(program, world, str(tmp_path))


@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
@pytest.mark.parametrize("world", [1, 2])
def test_a_trainer_finds_its_rows_on_the_parameter_server_again(world, tmp_path):
    server = redis_server.RedisServer(tmp_path).start()
    try:
        _run("tde_trainer.py", world, f"redis://{server.where}/?prefix=client{world}")
    finally:
        server.stop()
