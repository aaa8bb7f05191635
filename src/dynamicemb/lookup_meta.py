"""Imported for its effect by programs that export a model: it would register a kernel for torch.export."""

from __future__ import annotations

import logging

REGISTERED = False


def register_lookup_fake() -> bool:
    """Registers nothing and returns False: the operators are those of a CUDA library."""
    logging.getLogger(__name__).info("there are no operators of the original package to register")
    return REGISTERED


register_lookup_fake()
