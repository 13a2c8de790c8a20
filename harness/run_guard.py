"""Which exceptions are the implementation's, and which are somebody's wish to end the run."""

from __future__ import annotations

import signal


def ours_to_raise(error: BaseException) -> bool:
    """Whether an exception that comes out of an implementation must go on: a Ctrl-C, or the end of a generator.

    A process that ignores SIGINT, as the workers do, gets a KeyboardInterrupt from nobody but the implementation.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return isinstance(error, GeneratorExit)
