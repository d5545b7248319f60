# SPDX-License-Identifier: Apache-2.0
"""The process of the contest's rivals: a worker with torch, in which cublasLt's algorithms can
enter as well.

It is started as :mod:`tunegen.runner.worker` is, and answers the same requests. An
:class:`tunegen.runner.protocol.Enter` without executable names a rival as its operation: that of
the product for the vendor's library through torch, ``cublaslt 3`` for the fourth algorithm that
cublasLt offers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import _rival_cublaslt
import _tree  # noqa: F401 (makes tunegen importable)

from tunegen.device import Gpu
from tunegen.errors import DeviceError
from tunegen.runner import contest, vendor, worker
from tunegen.runner.operands import Operands
from tunegen.runner.protocol import Enter

CUBLASLT = "cublaslt"


class CublasLtCall:
    """Calls with one of the algorithms, one for each set of operands; has what
    :class:`tunegen.runner.vendor.VendorCall` has.

    Raises :class:`DeviceError` for a number beyond those offered.
    """

    direct = False

    def __init__(self, lt: CublasLt, gpu: Gpu, operands: Operands, number: int) -> None:
        product = lt.product
        assert product is not None
        offers = product.offers
        if number >= len(offers):
            raise DeviceError(f"cublasLt offers {len(offers)} algorithms")
        self._calls: list[Callable[[], None]] = [
            product.launch(
                offers[number], operands.addresses(index), lt.workspace, int(gpu.stream)
            )
            for index in range(len(operands.sets))
        ]
        self.description = (
            f"cublasLt {lt.library.version}, algorithm {number + 1} of {len(offers)}"
        )

    def launch(self, index: int) -> None:
        self._calls[index]()


class CublasLt:
    """cublasLt in this process: its handle, a workspace, and the product that is prepared."""

    def __init__(self, gpu: Gpu) -> None:
        vendor._load_torch()  # which brings the library
        self.library = _rival_cublaslt.Library(_rival_cublaslt.load())
        self.workspace = gpu.allocate(_rival_cublaslt.WORKSPACE_BYTES)
        self.product: _rival_cublaslt.Product | None = None
        self._of: tuple[Operands, str] | None = None

    def call(self, gpu: Gpu, operands: Operands, number: int, layout: str) -> CublasLtCall:
        if operands.in_place:
            raise DeviceError("cublasLt is asked for no product that is added to another one")
        if self._of != (operands, layout):
            if self.product is not None:
                self.product.close()
            self._of = self.product = None
            placed = operands.sets[0]
            addresses = [p.address for placed in operands.sets for p in placed.values()]
            arrays = {name: p.array for name, p in placed.items()}
            alignment = min(address & -address for address in addresses)
            self.product = _rival_cublaslt.Product(self.library, arrays, layout, alignment)
            self._of = (operands, layout)
        return CublasLtCall(self, gpu, operands, number)


class Rivals:
    """Stands in the place of :class:`tunegen.runner.vendor.VendorCall`."""

    def __init__(self) -> None:
        self._lt: CublasLt | None = None

    def __call__(
        self, gpu: Gpu, operands: Operands, request: Enter
    ) -> vendor.VendorCall | CublasLtCall:
        kind, _, number = request.operation.partition(" ")
        if kind != CUBLASLT:
            return vendor.VendorCall(gpu, operands, request)
        if self._lt is None:
            self._lt = CublasLt(gpu)
        return self._lt.call(gpu, operands, int(number), request.layout)


if __name__ == "__main__":
    contest.VendorCall = Rivals()  # type: ignore[assignment, misc]
    worker.main(sys.argv[1:])
