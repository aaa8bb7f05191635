"""Python programs in processes of their own that need not wait for imports.

    output = run(["program.py", "--steps", 3], ranks=2, needs=("torchrec",), seconds=100)

Importing torch, TorchRec or TensorFlow takes seconds in every process. Here one process imports them, once,
and a program is a fork of it, which goes on as `python program.py --steps 3` would; ranks get the environment
that torchrun gives them. A rank that fails ends the others and fails the test with all that was printed, and
nothing that a program started outlives it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

from ports import free_port

GRACE_SECONDS = 5.0  # for the other ranks to say what they have to say, once one has failed
TESTS = Path(__file__).parent

# ---- what tests call

_server = None


def run(program, *, ranks=0, needs=(), seconds, cwd=None, environment=None):
    """What the program printed; AssertionError with its end unless every process returned 0.

    program  the path of a file and its arguments, or "-m", a module and its arguments
    ranks    0: without the environment of torchrun
    needs    modules to import before forking
    """
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"},
        )
    with tempfile.NamedTemporaryFile() as output:
        request = {
            "program": [str(part) for part in program],
            "ranks": ranks,
            "needs": list(needs),
            "seconds": seconds,
            "cwd": str(cwd or os.getcwd()),
            "environment": {name: str(value) for name, value in (environment or {}).items()},
            "output": output.name,
        }
        try:
            _server.stdin.write(json.dumps(request).encode() + b"\n")
            _server.stdin.flush()
            answered, _, _ = select.select([_server.stdout], [], [], seconds + 60)  # imports take a while
            answer = _server.stdout.readline() if answered else b""
            codes = json.loads(answer) if answer else "no answer"
        except BaseException:  # such as the time limit of the test
            end()
            raise
        if not answer:
            end()
        printed = Path(output.name).read_text(errors="replace")
    assert isinstance(codes, list) and not any(codes), f"exit codes {codes}:\n{printed[-6000:]}"
    return printed


def end():
    """Ends the server and the program that it runs."""
    global _server
    if _server is not None:
        _server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            _server.wait(10)
        _server.kill()
        _server.wait()
        _server.stdin.close()
        _server.stdout.close()
        _server = None


atexit.register(end)

# ---- the process that is forked

_group = 0  # of the processes of the program that runs
_FILTERS = list(warnings.filters)  # before an import changes them


def _serve():
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    signal.signal(signal.SIGTERM, _end_program)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for module in request["needs"]:
            importlib.import_module(module)
        gc.freeze()  # a collection in a fork would copy every page
        children = _start(request)
        if children is None:
            _become(request)
        os.write(answers, json.dumps(_wait(children, request["seconds"])).encode() + b"\n")


def _start(request):
    """The processes of the ranks; None in each of them."""
    global _group
    _group, children = 0, []
    store = free_port()
    for rank in range(max(request["ranks"], 1)):
        child = os.fork()
        if child == 0:
            os.setpgid(0, _group)
            if request["ranks"]:
                os.environ |= _environment_of_a_rank(rank, request["ranks"], store)
            return None
        _group = _group or child
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it did so itself, or has ended
            os.setpgid(child, _group)
        children.append(child)
    return children


def _environment_of_a_rank(rank, ranks, port):
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _wait(children, seconds):
    """Their exit codes, -9 of those that were killed: at the time limit, or because another failed."""
    deadline = time.monotonic() + seconds
    codes = {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            codes[child] = os.waitstatus_to_exitcode(status)
            if codes[child] != 0:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        elif child == 0:
            time.sleep(0.01)
    _kill_group()
    for child in children:
        if child not in codes:
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def _kill_group():
    if _group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_group, signal.SIGKILL)


def _end_program(*_):
    _kill_group()
    os._exit(1)


def _become(request):
    """This process, a fork, is the program from now on."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull) as nothing, open(request["output"], "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= request["environment"]
    os.chdir(request["cwd"])
    warnings.filters[:] = _FILTERS
    warnings._filters_mutated()
    code = 1
    try:
        _run(*request["program"])
        code = 0
    except SystemExit as wanted:
        code = wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
        if code and not isinstance(wanted.code, int):
            print(wanted.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    # What an interpreter does at its end, but for taking apart modules that it shares with the other forks.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(path, *arguments):
    if path == "-m":
        path, *arguments = arguments
        sys.path.insert(0, os.getcwd())
        sys.argv = [path, *arguments]
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        sys.argv = [path, *arguments]
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    _serve()
