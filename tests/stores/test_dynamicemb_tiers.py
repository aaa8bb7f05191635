"""Memory over SSD over Redis under a table of dynamicemb: one line of options, on one rank and two."""

import pytest
import redis_server
from faces.dynamicemb import ranks
from stores import tier_jobs


@pytest.mark.multirank
@pytest.mark.skipif(redis_server.MISSING is not None, reason=str(redis_server.MISSING))
@pytest.mark.parametrize("world", [1, 2])
def test_rows_pass_through_files_and_redis_unchanged_and_end_in_redis(world, tmp_path):
    server = redis_server.RedisServer(tmp_path / "redis").start()
    try:
        url = f"redis://{server.where}/?prefix=shop"
        results = ranks.run(world, tier_jobs.train_over, str(tmp_path / "rows"), url)
        keys = [key for result in results for key in result["keys"]]
        assert len(keys) == len(set(keys)) > 128 * world
        for result in results:
            assert result["same"] and result["evictions"] > 0
        names = server.cli("keys", "shop_table_*").split()
        assert sorted(int(name.partition("_gid_")[2].partition("_")[0]) for name in names) == sorted(keys)
    finally:
        server.stop()
