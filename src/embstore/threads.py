"""The engine's threads and instruction set."""

from __future__ import annotations

from embstore import _core


def set_num_threads(threads: int) -> None:
    """Sets how many threads the engine uses; results do not depend on it.

    Args:
        threads: 1 to 1024, the calling thread included.

    Raises:
        ValueError: `threads` is out of range.

    Examples:
        >>> import embstore
        >>> before = embstore.get_num_threads()
        >>> embstore.set_num_threads(1)
        >>> embstore.get_num_threads()
        1
        >>> embstore.set_num_threads(before)
    """
    _core.set_num_threads(threads)


def get_num_threads() -> int:
    """How many threads the engine uses: EMBSTORE_NUM_THREADS, else OMP_NUM_THREADS, else the cores.

    Returns:
        The number, the calling thread included.

    Examples:
        >>> import embstore
        >>> embstore.get_num_threads() >= 1
        True
    """
    return _core.get_num_threads()


def isa() -> str:
    """The instruction set that the kernels run with: "avx512", "avx2" or "plain".

    Returns:
        Its name. All give the same bits.

    Examples:
        >>> import embstore
        >>> embstore.isa() in ("avx512", "avx2", "plain")
        True
    """
    return _core.isa()
