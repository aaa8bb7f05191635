"""The commands of `embstore`. A log is read as if its state had been dumped: base and increments.

    embstore inspect /data/monday            embstore diff /data/monday /data/tuesday
    embstore verify /data/monday             embstore convert /data/monday out --to v2
    embstore get /data/monday 7 -- -1        embstore merge /data/log out
    embstore serve /data/log --port 8200     embstore doctor
    embstore advise /data/log                embstore plan --table user,rows=1e9,dim=16

Exit codes: 0 all is well, 1 a difference was found or a key is missing, 2 wrong use (also: not a dump),
3 the dump is damaged.
"""

from embstore.cli import planning, reading, serving, writing  # noqa: F401  (they add their commands)
from embstore.cli.app import app

__all__ = ["app"]
