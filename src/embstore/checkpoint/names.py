"""Names of tables and collections as names of files, which stay inside their folder.

user.clicks     user.clicks
a/b             a%2Fb
..              %2E%2E
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote, unquote

# A file name has at most 255 bytes; the longest suffix of a layout needs less than 80.
LONGEST = 160
KEPT = 120
# Between a stem and the suffixes of its optimizer states; a table's own name must not look like it.
STATE_MARK = "_opt_state_"


def file_stem(name: str) -> str:
    """The name with everything but letters, digits and ``_.-~`` as %XX of its UTF-8 bytes.

    Different names never share a stem: what is too long keeps its first bytes and gets a digest.
    """
    stem = quote(name, safe=" +,=@:()[]{}#!&;", errors="surrogatepass")
    if stem.strip(".") == "" or stem.startswith("."):
        stem = stem.replace(".", "%2E")
    stem = stem.replace(STATE_MARK, STATE_MARK.replace("_", "%5F", 1))
    if len(stem) > LONGEST:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        stem = f"{stem[:KEPT]}%~{digest}"  # no escaped name holds "%~"
    return stem


def name_of(stem: str) -> str:
    """The inverse of `file_stem`, but for names that were too long."""
    return unquote(stem, errors="surrogatepass")
