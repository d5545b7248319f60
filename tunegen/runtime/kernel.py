# SPDX-License-Identifier: Apache-2.0
"""A tuned operation, loaded and ready to be launched on other people's memory and streams."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tunegen.device import driver
from tunegen.errors import DeviceError, PlanError, UsageError, unknown
from tunegen.model import SM_COUNT, Limit, evaluate
from tunegen.runtime.arrays import View, read
from tunegen.runtime.context import Context, refusals
from tunegen.runtime.launches import Arguments, Binding, Modules
from tunegen.runtime.program import ALIGN, Program
from tunegen.runtime.sizes import resolve
from tunegen.runtime.streams import handle_of
from tunegen.runtime.workspace import Workspaces

# Factors that every BLAS has, with the values that leave them out. Any other has to be given.
_NEUTRAL = {"alpha": 1.0, "beta": 0.0}

# Shapes that are remembered ready to launch; a program with more of them starts over.
_BINDINGS = 1024

_NO_OTHER = "use another kernel for this problem"


class Kernel:
    """One operation on one device, made by :func:`tunegen.load`.

    It serves every problem that its limits allow. Calls may come from several threads; the
    context is that of :class:`Context`, whichever one is current when it is called. It stays
    loaded until :meth:`close`, which a ``with`` block calls.

    ``program`` says what it is: its name, operands, scalars, limits, and where the images are
    from. Raises :class:`DeviceError` where the driver does not load the images or the device
    lacks the shared memory.
    """

    def __init__(self, program: Program, context: Context) -> None:
        self.program = program
        self.context = context
        self._lock = threading.Lock()
        with refusals(f"{program.name} on {context}"), context.entered():
            self._modules = Modules(program, context)
        self._arguments = Arguments(program)
        self._workspaces = Workspaces(program, context)
        self._bindings: dict[Any, Binding] = {}
        self._address_limits = tuple(x for x in program.limits if program.on_address(x))
        self._size_limits = tuple(x for x in program.limits if not program.on_address(x))

    def __repr__(self) -> str:
        return f"<Kernel {self.program.name}, {self.program.source}, on {self.context}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def launch(
        self,
        *,
        sizes: Mapping[str, int] | None = None,
        stream: Any = None,
        workspace: Any = None,
        **values: Any,
    ) -> None:
        """Put one call on ``stream`` and return; operands and scalars are given by name.

        An operand is an address on the device, or an array with ``__dlpack__`` or
        ``__cuda_array_interface__`` (torch, CuPy, JAX, Numba ...). Sizes come from the shapes of
        arrays, leading dimensions from their strides; ``sizes`` gives by name what addresses
        cannot tell, and rows are then adjacent unless it gives leading dimensions too. A matmul's
        ``A`` and ``B`` are the arrays as they are stored: for layout ``t`` the transposed one, or
        a transposed view of it where the shapes leave no doubt. What is written must overlap no
        other operand.

        ``alpha`` is 1 and ``beta`` 0 unless given, other scalars have to be given. ``stream`` is
        a handle or a stream of cuda.core, torch or CuPy; None is the legacy default stream. Work
        that produces operands has to be on that stream, or done; only DLPack and newer array
        interfaces say which stream an array comes from, and torch's tensors are not asked.
        ``workspace`` is memory to use instead of a block that is kept for each stream.

        Raises :class:`UsageError` for operands that do not fit, :class:`PlanError` for a limit
        that does not hold, :class:`DeviceError` where memory is short or the driver refuses.
        Nothing is launched then, and nothing for an empty output.
        """
        handle = handle_of(stream)
        program, device = self.program, self.context.index
        views = [read(o, values.pop(o.name, None), device, handle) for o in program.operands]
        scalars = {name: self._factor(name, values) for name in program.scalars}
        if values:
            known = (*(o.name for o in program.operands), *program.scalars)
            raise unknown(f"argument of {program.name}", next(iter(values)), known)
        key = (tuple([view[1:4] for view in views]), tuple(sizes.items()) if sizes else ())
        with self._lock:
            binding = self._bindings.get(key) or self._bind(views, sizes or {}, key)
            if not binding.launches:
                return
            self._check_addresses(views, binding)
            try:
                if self.context.is_current():
                    self._submit(binding, views, scalars, handle, workspace)
                else:
                    with self.context.entered():
                        self._submit(binding, views, scalars, handle, workspace)
            except driver.CudaError as error:
                raise DeviceError(f"{program.name} on {self.context}: {error}") from error

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of ``workspace`` that :meth:`launch` takes for these sizes; 0 for none.

        Raises :class:`UsageError` and :class:`PlanError` as :meth:`launch` does.
        """
        with self._lock:
            addresses = [View(0) for _ in self.program.operands]
            return self._bind(addresses, sizes).workspace_bytes

    def close(self) -> None:
        """Wait for the device, unload the kernels, free what they held. Later launches fail."""
        with self._lock, refusals(f"closing {self.program.name}"), self.context.entered():
            driver.call("cuCtxSynchronize")
            self._bindings.clear()
            self._workspaces.release()
            self._modules.unload()

    def _factor(self, name: str, values: dict[str, Any]) -> float:
        value = values.pop(name, _NEUTRAL.get(name))
        if value is None:
            raise UsageError(f"{name} is missing")
        factor = float(value)
        # An attribute of that name tells kernels that read C from those that only write it.
        used = self.program.problem.get(name)
        if used is not None and bool(used) != bool(factor):
            wanted = "other than 0" if used else "0"
            raise PlanError(
                f"{self.program.name} was made for {name}={used}: it needs {name} {wanted}, not "
                f"{factor:g}",
                hint=_NO_OTHER,
            )
        return factor

    def _bind(self, views: Sequence[View], sizes: Mapping[str, int], key: Any = None) -> Binding:
        program = self.program
        if not self._modules.functions:
            raise UsageError(f"{program.name} has been closed")
        names = {**resolve(program, views, sizes), SM_COUNT: self.context.sm_count}
        for limit in self._size_limits:
            if not limit.holds(names):
                raise PlanError(
                    f"{program.name} needs {limit}: {limit.quantity} is "
                    f"{names.get(limit.quantity, 'not known')}",
                    hint=_NO_OTHER,
                )
        plan = program.plan.bind(names)
        needed = [all(evaluate(extent, names) for extent in o.shape) for o in program.operands]
        binding = Binding(plan, self._modules.functions, self._arguments, needed)
        if key is not None:
            if len(self._bindings) >= _BINDINGS:
                self._bindings.clear()
            self._bindings[key] = binding
        return binding

    def _check_addresses(self, views: Sequence[View], binding: Binding) -> None:
        bits = 0
        for view, needed, operand in zip(
            views, binding.needed, self.program.operands, strict=True
        ):
            if needed and not view.address:
                raise UsageError(f"{operand.name} has elements and a null address")
            bits |= view.address
        if not self._address_limits:
            return
        seen = {o.name: v.address for o, v in zip(self.program.operands, views, strict=True)}
        seen[ALIGN] = bits & -bits  # the largest power of two in all of them; 0 is a multiple too
        for limit in self._address_limits:
            if not limit.holds(seen):
                raise self._misaligned(limit, seen)

    def _misaligned(self, limit: Limit, seen: Mapping[str, int]) -> PlanError:
        operands = [o.name for o in self.program.operands]
        if limit.quantity == ALIGN and limit.rule == "multiple_of":
            operands = [name for name in operands if seen[name] % limit.value]
        where = ", ".join(f"{name} is at {seen[name]:#x}" for name in operands)
        return PlanError(
            f"{self.program.name} needs {limit} (of addresses, in bytes): {where}",
            hint=f"give an aligned copy, or {_NO_OTHER}",
        )

    def _submit(
        self,
        binding: Binding,
        views: Sequence[View],
        scalars: Mapping[str, float],
        stream: int,
        workspace: Any,
    ) -> None:
        for cell, view in zip(self._arguments.pointers, views, strict=True):
            cell.value = view.address
            if view.stream not in (None, stream):
                self.context.order(view.stream, stream)
        for cell, name in self._arguments.scalars:
            cell.value = scalars[name]
        if size := binding.workspace_bytes:
            if workspace is None:
                binding.place_workspace(self._workspaces.of(stream, size))
            else:
                zeroed = binding.zeroed_bytes
                binding.place_workspace(self._workspaces.given(workspace, stream, size, zeroed))
        binding.submit(stream)
