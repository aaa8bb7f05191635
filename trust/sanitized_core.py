"""A plug-in of pytest that loads the extension of a build with sanitizers: `make sanitize-python`.

EMBSTORE_CORE names the file. It takes the place of the installed one before anything imports embstore.
"""

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location("embstore._core", os.environ["EMBSTORE_CORE"])
assert _spec is not None and _spec.loader is not None
_core = importlib.util.module_from_spec(_spec)
sys.modules["embstore._core"] = _core
_spec.loader.exec_module(_core)


def pytest_report_header() -> str:
    return f"embstore._core: {_core.__file__}"
