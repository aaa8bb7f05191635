"""TorchRec models whose tables are a window on a parameter server.

    import torchrec_dynamic_embedding as tde

    loader = tde.wrap("redis://127.0.0.1:6379/?prefix=model", loader, model, {"emb": configs})

`torch.ops.tde.register_io(path)` adds a parameter server of your own: see docs/parameter_server.md.
"""

try:
    import torchrec as _torchrec  # noqa: F401
except ImportError as _error:
    from embstore.extras import missing as _missing

    raise _missing("torchrec_dynamic_embedding", "torchrec", _error) from _error

from . import register_io  # noqa: F401 - defines torch.ops.tde.register_io
from .dataloader import save, wrap

__all__ = ["save", "wrap"]
