"""What to install when an optional package is missing.

try:
    import torch
except ImportError as error:
    raise missing("embstore.Embedding", "torch", error) from error
"""

from __future__ import annotations


def missing(user: str, extra: str, error: ImportError) -> ImportError:
    """An ImportError of one line: who needs what, and the extra of embstore that brings it."""
    more = " and: pip install --no-deps torchrec==1.8.0" if extra == "torchrec" else ""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ImportError(
        f"{user} needs an extra: pip install 'embstore[{extra}]'{more} ({reason})", name=error.name
    )
