# SPDX-License-Identifier: Apache-2.0
"""What one kind of GPU really does, as its own kernels measured it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunegen.model.record import DeviceIdentity

# Streams of device memory, by the share of their bytes that is written.
STREAM_WRITES: Mapping[str, float] = {"read": 0.0, "add": 1 / 3, "copy": 0.5, "write": 1.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure: the median over ``repeats`` of the best configuration, with the lowest
    and the highest. ``config`` says which one that was, ``tried`` how many there were."""

    median: float
    low: float
    high: float
    repeats: int
    config: str = ""
    tried: int = 1

    @property
    def spread(self) -> float:
        """The larger distance of a repeat from the median, as a share of it."""
        if self.median <= 0:
            return 0.0
        return max(self.high - self.median, self.median - self.low) / self.median

    def joined(self, other: Figure, *, faster: Callable[[float, float], float]) -> Figure:
        """Two runs as one: the median that is ``faster`` (``min`` of times, ``max`` of rates),
        and the lowest and highest of both."""
        best = self if faster(self.median, other.median) == self.median else other
        return Figure(
            best.median, min(self.low, other.low), max(self.high, other.high),
            self.repeats + other.repeats, best.config, max(self.tried, other.tried),
        )  # fmt: skip

    def rate(self, amount: float, launch_us: float = 0.0) -> Figure:
        """``amount`` over this time, less that of a launch: low and high change places."""
        low, median, high = (us - launch_us for us in (self.low, self.median, self.high))
        return Figure(
            amount / median, amount / high, amount / low, self.repeats, self.config, self.tried
        )


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """A stream at one size: ``bytes`` read and written together, and the microseconds of a call,
    one of many in a row on operands that are not in L2."""

    bytes: int
    us: Figure

    @property
    def gbps(self) -> Figure:
        return self.us.rate(self.bytes / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The ceilings of a device class, measured on one card of it.

    ``streams`` holds, by the names of :data:`STREAM_WRITES`, points of ascending size.
    ``peak_tflops`` has "fp32" and "fp64", and "fp16_packed" and "bf16_packed" for pairs in one
    register, all outside of tensor cores, a multiply-add being two operations. ``launch_us`` is
    what an empty kernel takes among many in a row, ``dependent_launch_us`` what one more launch
    of the same call adds.

    Where it joins several ``runs``, figures are those of the fastest, and their spread is over
    all: runs differ by more than repeats within a second do.

    ``policy`` is how times were taken. ``sm_clock_mhz`` are the lowest and the highest clock that
    were seen, ``throttle`` every reason for throttling. ``created`` is a time of ISO 8601.
    """

    arch: str
    device: DeviceIdentity
    streams: Mapping[str, tuple[StreamPoint, ...]]
    l2_read_gbps: Figure | None
    shared_read_gbps: Figure | None
    peak_tflops: Mapping[str, Figure]
    launch_us: Figure
    dependent_launch_us: Figure
    policy: str
    driver: str
    nvrtc: str
    tunegen: str
    created: str
    sm_clock_mhz: tuple[int, int] | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = field(default=())
    runs: int = 1

    def joined(self, earlier: Calibration) -> Calibration:
        """This run and ``earlier`` ones of the same device class and driver as one. What only one
        of them measured is taken as it is."""
        assert (self.arch, self.device, self.driver) == (
            earlier.arch, earlier.device, earlier.driver,
        )  # fmt: skip
        return replace(
            self,
            streams={
                name: _joined_points(self.streams.get(name, ()), earlier.streams.get(name, ()))
                for name in {**self.streams, **earlier.streams}
            },
            l2_read_gbps=_joined(self.l2_read_gbps, earlier.l2_read_gbps, max),
            shared_read_gbps=_joined(self.shared_read_gbps, earlier.shared_read_gbps, max),
            peak_tflops={
                name: found
                for name in {**self.peak_tflops, **earlier.peak_tflops}
                if (
                    found := _joined(
                        self.peak_tflops.get(name), earlier.peak_tflops.get(name), max
                    )
                )
            },
            launch_us=self.launch_us.joined(earlier.launch_us, faster=min),
            dependent_launch_us=self.dependent_launch_us.joined(
                earlier.dependent_launch_us, faster=min
            ),
            throttle=tuple(sorted({*self.throttle, *earlier.throttle})),
            runs=self.runs + earlier.runs,
        )

    def largest(self, stream: str) -> StreamPoint | None:
        """The point of a stream that moves most, None where the stream was not measured."""
        points = self.streams.get(stream, ())
        return points[-1] if points else None


def _joined(
    new: Figure | None, old: Figure | None, faster: Callable[[float, float], float]
) -> Figure | None:
    if new is None or old is None:
        return new or old
    return new.joined(old, faster=faster)


def _joined_points(
    new: Sequence[StreamPoint], old: Sequence[StreamPoint]
) -> tuple[StreamPoint, ...]:
    found = {point.bytes: point.us for point in old}
    for point in new:
        known = found.get(point.bytes)
        found[point.bytes] = point.us if known is None else point.us.joined(known, faster=min)
    return tuple(StreamPoint(size, found[size]) for size in sorted(found))
