# SPDX-License-Identifier: Apache-2.0
"""As much of torch as the vendor's calls use, over NumPy and the memory of the fake GPU.

Operations run on the current stream, which is the fake GPU's: they take its time, and are recorded
while it records.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from emulator.numbers import load, store
from fake_gpu import FakeGpu

from tunegen.kernels.matmul import activated


class Tensor:
    def __init__(self, torch: FakeTorch, values: np.ndarray, dtype: str) -> None:
        self.torch, self.values, self.dtype = torch, values, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.torch, self.values[index], self.dtype)

    def transpose(self, first: int, second: int) -> Tensor:
        return Tensor(self.torch, self.values.swapaxes(first, second), self.dtype)

    def view(self, dtype: str) -> Tensor:
        assert self.values.dtype == np.int16
        return Tensor(self.torch, self.values.view(np.uint16), dtype)

    @property
    def wide(self) -> np.ndarray:
        return load(self.values, self.dtype)

    def fill_(self, value: float) -> None:
        self.torch.run("fill_", self, lambda: np.full(self.shape, value))

    def copy_(self, other: Tensor) -> None:
        self.torch.run("copy_", self, lambda: other.wide)

    @property
    def device(self) -> str:
        return "cuda:0"

    def to(self, dtype: str) -> Tensor:
        return Tensor(self.torch, store(self.wide, dtype), dtype)

    def add_(self, other: Tensor, *, alpha: float = 1.0) -> None:
        self.torch.run("add_", self, lambda: self.wide + alpha * other.wide)

    def addmm_(self, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
        assert self.values.ndim == 2
        self.torch.run("addmm_", self, lambda: beta * self.wide + alpha * (a.wide @ b.wide))

    def baddbmm_(self, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
        assert self.values.ndim == 3
        self.torch.run("baddbmm_", self, lambda: beta * self.wide + alpha * (a.wide @ b.wide))


_DTYPES = {"<f8": "fp64", "<f4": "fp32", "<f2": "fp16", "<i2": "int16"}


class FakeTorch(types.ModuleType):
    """``calls`` names what was launched; ``us`` is what each call takes."""

    __version__ = "2.11.0"
    bfloat16, float32 = "bf16", "fp32"

    def __init__(self, gpu: FakeGpu, us: float = 30.0, available: bool = True) -> None:
        super().__init__("torch")
        self.gpu, self.us = gpu, us
        self.calls: list[str] = []
        self.precision = "high"
        self.stream: Any = None
        self.cuda = types.SimpleNamespace(
            is_available=lambda: available, set_stream=self._set_stream,
            ExternalStream=lambda pointer, device: (pointer, device),
        )  # fmt: skip
        self.ops = types.SimpleNamespace(
            aten=types.SimpleNamespace(relu_=self._relu, gelu_=self._gelu, silu_=self._silu)
        )
        self.version = types.SimpleNamespace(cuda="13.0")
        matmul = types.SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
        self.backends = types.SimpleNamespace(cuda=types.SimpleNamespace(matmul=matmul))

    def _set_stream(self, stream: Any) -> None:
        self.stream = stream

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.precision = precision

    def as_tensor(self, shared: Any, device: str) -> Tensor:
        assert device == "cuda:0"
        interface = shared.__cuda_array_interface__
        shape, strides = interface["shape"], interface["strides"]
        item = np.dtype(interface["typestr"])
        address, read_only = interface["data"]
        assert not read_only
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) // item.itemsize
        flat = self.gpu.memory.view(address, extent, item)
        values = np.lib.stride_tricks.as_strided(flat, shape, strides)
        return Tensor(self, values, _DTYPES[interface["typestr"]])

    def run(self, name: str, out: Tensor, compute: Any) -> None:
        assert self.stream == (0, "cuda:0")
        if self.gpu._recording is None:
            self.calls.append(name)

        def act() -> None:
            result = compute()
            assert result.shape == out.shape
            out.values[...] = store(result, out.dtype)

        self.gpu._do(self.us, act)

    def zeros(self, size: int, *, dtype: str, device: str) -> Tensor:
        assert device == "cuda:0"
        return Tensor(self, store(np.zeros(size), dtype), dtype)

    def empty(self, shape: tuple[int, ...], *, dtype: str, device: str) -> Tensor:
        assert device == "cuda:0"
        return Tensor(self, store(np.full(shape, np.nan), dtype), dtype)

    def _product(
        self, name: str, a: Tensor, b: Tensor, out: Tensor, out_dtype: str | None, compute: Any
    ) -> None:
        assert a.dtype == b.dtype
        assert out.dtype == (out_dtype or a.dtype)
        assert out_dtype is None or a.dtype in ("fp16", "bf16")
        self.run(name, out, compute)

    def mm(self, a: Tensor, b: Tensor, *, out: Tensor, out_dtype: str | None = None) -> None:
        assert out.values.ndim == 2
        self._product("mm", a, b, out, out_dtype, lambda: a.wide @ b.wide)

    def bmm(self, a: Tensor, b: Tensor, *, out: Tensor, out_dtype: str | None = None) -> None:
        assert out.values.ndim == 3
        self._product("bmm", a, b, out, out_dtype, lambda: a.wide @ b.wide)

    def addmm(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor,
        out_dtype: str | None = None, name: str = "addmm",
    ) -> None:  # fmt: skip
        assert out.values.ndim == (2 if name == "addmm" else 3)
        assert c.dtype == out.dtype

        def compute() -> np.ndarray:
            product = alpha * (a.wide @ b.wide)
            return product + beta * c.wide if beta else product  # with 0 c is not read

        self._product(name, a, b, out, out_dtype, compute)

    def baddbmm(self, *tensors: Tensor, **how: Any) -> None:
        self.addmm(*tensors, **how, name="baddbmm")

    def _addmm_activation(self, c: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        assert (c.values.ndim, out.values.ndim) == (1, 2)
        self._product(
            "_addmm_activation", a, b, out, None,
            lambda: np.maximum(a.wide @ b.wide + c.wide, 0),
        )  # fmt: skip

    def _relu(self, c: Tensor) -> None:
        self.run("relu_", c, lambda: activated(c.wide, "relu"))

    def _gelu(self, c: Tensor, *, approximate: str) -> None:
        assert approximate == "none"
        self.run("gelu_", c, lambda: activated(c.wide, "gelu"))

    def _silu(self, c: Tensor) -> None:
        self.run("silu_", c, lambda: activated(c.wide, "silu"))

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        self.run("add", out, lambda: x.wide + y.wide)
