"""Without an optional package, and while another thread imports one."""

import importlib
import subprocess
import sys

import pytest

from embstore import old_paths

REDIS = (
    "from embstore.stores.redis.store import RedisStore as R; R('redis://h:1', table='t', tensor_bytes=[8])"
)
USES = [
    ("torch", "torch", "import embstore; embstore.Embedding(4)"),
    ("torch", "torch", "import embstore.checkpoint.torch_checkpoint"),
    ("torch", "torch", "import one_embedding"),
    ("torch", "torchrec", "import dynamicemb"),
    ("torchrec", "torchrec", "import dynamicemb"),
    ("fbgemm_gpu", "torchrec", "import dynamicemb"),
    ("torch", "torchrec", "import torchrec_dynamic_embedding"),
    ("torchrec", "torchrec", "import torchrec_dynamic_embedding"),
    ("tensorflow", "tensorflow", "import sparse_operation_kit"),
    ("redis", "redis", REDIS),
    ("hiredis", "redis", REDIS),
    ("fastapi", "serve", "import embstore.serving.server"),
]


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("package", "extra", "use"), USES)
def test_a_missing_package_is_told_in_one_line_with_the_extra_that_brings_it(package, extra, use):
    done = run(f"import sys; sys.modules[{package!r}] = None; {use}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: "), done.stderr
    assert f"pip install 'embstore[{extra}]'" in last and package in last


def test_calls_work_while_another_thread_imports_torch():
    program = """
import sys, threading
import numpy as np
import embstore
from embstore.distributed.ranks import ranks_of

table = embstore.Table("t", dim=2)
thread = threading.Thread(target=__import__, args=("torch",))
thread.start()
calls = during = 0
while thread.is_alive():
    during += "torch" in sys.modules
    table.find_or_insert(np.arange(calls % 97, dtype=np.int64))
    table.apply_gradients([1], [[1.0, 1.0]])
    assert ranks_of().world == 1
    calls += 1
print(during)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize("old, new", sorted(old_paths.MOVED.items()))
def test_a_module_that_has_moved_is_the_same_module_by_its_old_name(old: str, new: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(new)
