# SPDX-License-Identifier: Apache-2.0
"""Reading a bundle: which image for which device, how to launch it, and whether it is whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tunegen.bundle.compatibility import cubin_runs_on, driver_too_old, shared_memory_lacks
from tunegen.bundle.manifest import Entry, Floor, Image, Manifest, ShippedKernel, decode
from tunegen.errors import BundleError, PlanError, UsageError, unknown
from tunegen.model import SM_COUNT, LaunchPlan, capability, evaluate

MANIFEST_FILE = "manifest.json"
SUMS_FILE = "SHA256SUMS"
LICENSE_FILE = "LICENSE"

# Multiprocessors with which every plan launches something: the largest cluster has 16 blocks.
_SMALL_DEVICE = 16


@dataclass(frozen=True, slots=True)
class Selection:
    """What to load on a device: cubins of an image, or PTX for the driver to compile."""

    kind: Literal["cubin", "ptx"]
    target: str
    kernels: tuple[ShippedKernel, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with one file of a bundle."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk. Opening checks the manifest, :meth:`verify` every file."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path | str) -> Bundle:
        """Raises :class:`BundleError` for a manifest that is missing, damaged, of another schema,
        or contradicts itself."""
        folder = Path(folder)
        try:
            content = (folder / MANIFEST_FILE).read_bytes()
        except OSError as error:
            raise BundleError(
                f"{folder} is no bundle: {MANIFEST_FILE}: {error.strerror}"
            ) from error
        try:
            return cls(folder, check(content))
        except BundleError as error:
            raise BundleError(f"{folder / MANIFEST_FILE}: {error}") from error

    def entry(
        self,
        operation: str | None = None,
        *,
        dtype: str | None = None,
        layout: str | None = None,
        spec: str | None = None,
        name: str | None = None,
    ) -> Entry:
        """The one entry that computes ``operation``, of those with the given properties.

        Raises :class:`UsageError` for a value that no entry has, and :class:`BundleError` where
        several entries remain: their names tell them apart.
        """
        found = list(self.manifest.entries)
        wanted = (("operation", operation), ("dtype", dtype), ("layout", layout), ("spec", spec),
                  ("name", name))  # fmt: skip
        for field, value in wanted:
            if value is None:
                continue
            known = sorted({getattr(entry, field) for entry in found})
            if value not in known:
                raise unknown(f"{field} in {self.folder}", value, known)
            found = [entry for entry in found if getattr(entry, field) == value]
        if len(found) > 1:
            names = ", ".join(entry.name for entry in found)
            raise BundleError(f"{len(found)} entries fit", hint=f"choose by name: {names}")
        return found[0]

    def image(self, entry: Entry, target: str) -> Image:
        """The image for exactly this target; raises :class:`UsageError` naming those there are."""
        for image in entry.images:
            if image.target == target:
                return image
        raise unknown(f"target of {entry.name}", target, [image.target for image in entry.images])

    def select(self, entry: Entry, arch: str, driver: str | None = None) -> Selection:
        """What to load on a device of capability ``arch`` with this driver ("580.65.06").

        In this order: the image of its own capability; the nearest lower image of the same major
        that is not tied to its architecture; PTX. None of them where its shared memory does not
        fit or the driver is too old. Raises :class:`BundleError` saying why each was refused.
        """
        if arch != f"sm_{capability(arch)}":
            raise UsageError(f"arch {arch!r} of a device has no suffix")
        refusals = []
        images = sorted(entry.images, key=lambda i: (capability(i.target), i.target), reverse=True)
        for image in images:
            if refusal := _refuse_image(entry, image, arch, driver):
                refusals.append(f"{image.target} {refusal}")
                continue
            exact = capability(image.target) == capability(arch)
            how = "its own capability" if exact else f"runs on {arch}, of the same major"
            return Selection(
                "cubin", image.target, image.kernels, f"cubin for {image.target}: {how}"
            )
        if entry.ptx is None:
            refusals.append("no PTX")
        elif refusal := _refuse_ptx(entry, entry.ptx, arch, driver):
            refusals.append(f"PTX for {entry.ptx.target} {refusal}")
        else:
            reason = f"PTX {entry.ptx.isa} for {entry.ptx.target}: no cubin fits {arch}"
            return Selection("ptx", entry.ptx.target, entry.ptx.kernels, reason)
        device = f"{arch} with driver {driver}" if driver else arch
        raise BundleError(f"{entry.name} has nothing for {device}: {'; '.join(refusals)}")

    def plan(
        self, entry: Entry, sizes: Mapping[str, int], *, sm_count: int | None = None
    ) -> LaunchPlan:
        """The launch plan for these sizes and attributes, in numbers.

        ``sizes`` gives every name that limits and formulas use; ``sm_count``, the multiprocessors
        of the device, is needed where a formula names it. Raises
        :class:`BundleError` for a limit that does not hold or a size that is missing, and
        :class:`tunegen.errors.PlanError` for a grid beyond CUDA's limits or a tensor map that the
        driver would refuse.
        """
        for limit in entry.limits:
            if not limit.holds(sizes):
                given = sizes.get(limit.quantity, "not given")
                raise BundleError(
                    f"{entry.name} needs {limit}: {limit.quantity} is {given}",
                    hint="use another kernel for this problem",
                )
        names = [name for name in entry.problem if name in sizes]
        if negative := [name for name in names if sizes[name] < 0]:
            raise BundleError(f"{negative[0]} is {sizes[negative[0]]}, sizes are 0 or more")
        device = {} if sm_count is None else {SM_COUNT: sm_count}
        try:
            return entry.plan.bind({**sizes, **device})
        except KeyError as error:
            raise BundleError(f"{entry.name} needs {error.args[0]}, which is not given") from error

    def read(self, kernel: ShippedKernel) -> bytes:
        """The cubin or PTX of a kernel; raises :class:`BundleError` unless its hash is right."""
        try:
            content = (self.folder / kernel.file).read_bytes()
        except OSError as error:
            raise BundleError(f"{self.folder / kernel.file}: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != kernel.sha256:
            raise BundleError(f"{self.folder / kernel.file} is not the file in the manifest")
        return content

    def strangers(self) -> list[str]:
        """Files in the folder that do not belong to the bundle, by name."""
        own = {*_files(self.manifest), MANIFEST_FILE, SUMS_FILE, LICENSE_FILE}
        present = (path for path in self.folder.rglob("*") if path.is_symlink() or path.is_file())
        return sorted({path.relative_to(self.folder).as_posix() for path in present} - own)

    def verify(self) -> list[Finding]:
        """Everything wrong with the files; empty for a whole bundle."""
        named = _files(self.manifest)
        findings = []
        for name, digest in sorted(named.items()):
            actual = self._hash(name)
            if actual != digest:
                problem = "its hash is not the manifest's" if actual else "missing"
                findings.append(Finding(name, problem))
        findings += [Finding(name, "not part of the bundle") for name in self.strangers()]
        return findings + self._verify_sums(named)

    def _verify_sums(self, named: dict[str, str]) -> list[Finding]:
        own = {name: self._hash(name) for name in (MANIFEST_FILE, LICENSE_FILE)}
        expected: dict[str, str | None] = {**named, **own}
        try:
            listed = _parse_sums((self.folder / SUMS_FILE).read_text())
        except (OSError, ValueError) as error:
            return [Finding(SUMS_FILE, f"cannot be read: {error}")]
        findings = []
        for name in sorted(expected.keys() | listed.keys()):
            if name not in listed:
                findings.append(Finding(SUMS_FILE, f"does not list {name}"))
            elif name not in expected:
                findings.append(Finding(SUMS_FILE, f"lists {name}, which is not the bundle's"))
            elif listed[name] != expected[name]:
                findings.append(Finding(SUMS_FILE, f"does not match {name}"))
        return findings

    def _hash(self, name: str) -> str | None:
        try:
            return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
        except OSError:
            return None


def sums(hashes: Mapping[str, str]) -> bytes:
    """The content of ``SHA256SUMS``, for ``sha256sum -c``."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items())).encode()


def _parse_sums(text: str) -> dict[str, str]:
    listed = {}
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise ValueError(f"malformed line {line!r}")
        listed[name] = digest
    return listed


def _files(manifest: Manifest) -> dict[str, str]:
    """Every file that the manifest names, with its hash."""
    return {file: digest for entry in manifest.entries for file, digest in _entry_files(entry)}


def _entry_files(entry: Entry) -> Iterator[tuple[str, str]]:
    groups = [image.kernels for image in entry.images]
    for kernel in entry.sources:
        yield kernel.file, kernel.sha256
    for group in [*groups, entry.ptx.kernels if entry.ptx else ()]:
        yield from ((kernel.file, kernel.sha256) for kernel in group)


def check(content: bytes) -> Manifest:
    """The manifest in ``content``; raises :class:`BundleError` where it cannot be used."""
    try:
        manifest = decode(content)
    except msgspec.DecodeError as error:
        raise BundleError(f"damaged manifest: {error}") from error
    names = [entry.name for entry in manifest.entries]
    if len(set(names)) != len(names):
        raise BundleError("damaged manifest: two entries have one name")
    for entry in manifest.entries:
        if complaint := _contradiction(entry):
            raise BundleError(f"damaged manifest: {entry.name}: {complaint}")
    return manifest


def _contradiction(entry: Entry) -> str:
    """What in an entry does not go together, or the empty string."""
    launched = {launch.kernel for launch in entry.plan.launches}
    parts: list[Image | Floor] = [*entry.images, *([entry.ptx] if entry.ptx else [])]
    for part in parts:
        if lacking := sorted(launched - {kernel.kernel for kernel in part.kernels}):
            return f"no {', '.join(lacking)} for {part.target}"
    for operand in entry.operands:
        if len(operand.shape) != len(operand.strides):
            return f"{operand.name} has {len(operand.shape)} axes, {len(operand.strides)} strides"
    arrays = {operand.name for operand in entry.operands}
    for tensor_map in entry.plan.tensor_maps:
        if not tensor_map.in_workspace and tensor_map.array not in arrays:
            return f"tensor map {tensor_map.name} is of {tensor_map.array}, which is no operand"
    try:
        entry.plan.bind({**entry.problem, SM_COUNT: _SMALL_DEVICE})
        for operand in entry.operands:
            for extent in (*operand.shape, *operand.strides):
                evaluate(extent, entry.problem)
    except KeyError as error:
        return f"it uses {error.args[0]}, which is no size of its problem"
    except (ValueError, ArithmeticError, RecursionError, PlanError) as error:
        return f"it cannot be evaluated: {error}"
    return ""


def _shared_bytes(entry: Entry, kernels: tuple[ShippedKernel, ...]) -> int:
    """Most shared memory that a block of any launch needs, static and dynamic."""
    static = {kernel.kernel: kernel.shared_bytes for kernel in kernels}
    return max(
        (static[launch.kernel] + launch.shared_bytes for launch in entry.plan.launches), default=0
    )


def _refuse_image(entry: Entry, image: Image, arch: str, driver: str | None) -> str:
    if not cubin_runs_on(image.target, arch):
        return f"does not run on {arch}"
    if lacks := shared_memory_lacks(_shared_bytes(entry, image.kernels), arch):
        return lacks
    if driver_too_old(driver, image.min_driver):
        return f"needs a driver from {image.min_driver or 'an unknown branch'} on"
    return ""


def _refuse_ptx(entry: Entry, floor: Floor, arch: str, driver: str | None) -> str:
    if capability(floor.target) > capability(arch):
        return f"does not run on {arch}"
    if lacks := shared_memory_lacks(_shared_bytes(entry, floor.kernels), arch):
        return lacks
    if driver_too_old(driver, floor.min_driver):
        needed = floor.min_driver or "an unknown branch"
        return f"is version {floor.isa}, which needs a driver from {needed} on"
    return ""
