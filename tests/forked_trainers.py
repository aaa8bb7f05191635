"""Forks a trainer for every line it reads, says which process that is, and "gone" once it was killed.

python forked_trainers.py SCRIPT FOLDER: SCRIPT is imported once, and each trainer is main(FOLDER) of it.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    main = runpy.run_path(sys.argv[1])["main"]
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            main(Path(sys.argv[2]))
        os.waitpid(child, 0)
        print("gone", flush=True)
