"""Programs that start children: run in a process group of their own, within a time limit."""

import os
import signal
import subprocess


def run(command, seconds, **options):
    """Runs it in a group of its own, so that no child outlives the time limit."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-6000:]
    return output
