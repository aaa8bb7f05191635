"""`torch.ops.tde.register_io(path)`: loads a plug-in and opens URLs of its type with it from then on."""

from __future__ import annotations

import torch

from embstore.stores.plugin import load_plugin

_library = torch.library.Library("tde", "FRAGMENT")
_library.define("register_io(str path) -> ()")


def _register_io(path: str) -> None:
    load_plugin(path)


_library.impl("register_io", _register_io, "CompositeExplicitAutograd")
