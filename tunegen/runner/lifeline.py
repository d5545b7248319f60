# SPDX-License-Identifier: Apache-2.0
"""No worker outlives its parent, not even one whose kernel hangs."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; ``parent`` is the parent's number.

    The end of the pipe says the same, but a process that waits for a GPU does not read it. Linux
    means the thread that started this process: it must live as long as the worker is needed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it has ended in the meantime
        os.kill(os.getpid(), signal.SIGKILL)
