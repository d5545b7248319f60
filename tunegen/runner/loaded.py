# SPDX-License-Identifier: Apache-2.0
"""Kernels on the device, ready to run on the prepared operands."""

from __future__ import annotations

from contextlib import ExitStack

from tunegen.device import Call, Gpu
from tunegen.errors import DeviceError
from tunegen.runner.checks import Workspace
from tunegen.runner.operands import Operands, Placed
from tunegen.runner.protocol import Executable


class Loaded:
    """An executable in device memory, with a call for each set of operands.

    Raises :class:`DeviceError` where the device cannot load it or has no memory for its
    workspace.
    """

    def __init__(self, gpu: Gpu, operands: Operands, executable: Executable) -> None:
        plan = executable.plan
        if not plan.launches:
            raise DeviceError("the plan has no launches: there is nothing to run")
        self._gpu = gpu
        self._workspace: Workspace | None = None
        address = 0
        with ExitStack() as undo:
            kernels = gpu.load(executable.kernels)
            undo.callback(kernels.close)
            if size := int(plan.workspace_bytes):
                self._workspace = Workspace(gpu, size, zeroed=plan.zeroed)
                undo.callback(self._workspace.close)
                address = self._workspace.placed.address
            self._calls: list[Call] = [
                kernels.bind(plan, operands.addresses(index), operands.scalars, address)
                for index in range(len(operands.sets))
            ]
            self._undo = undo.pop_all()

    def launch(self, index: int) -> None:
        """Put a call on the stream that works on one set of operands."""
        self._calls[index].launch(self._gpu.stream)

    @property
    def workspace(self) -> Placed | None:
        """Where the workspace lies, if the plan needs one."""
        return self._workspace.placed if self._workspace else None

    def refresh(self) -> None:
        """Make the workspace as it is before the first call."""
        if self._workspace:
            self._workspace.refresh()

    def close(self) -> None:
        self._undo.close()
