# SPDX-License-Identifier: Apache-2.0
"""Bundles: written the same every time, whole or not at all, and never a silent default."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taken import PORTABLE

from tunegen import bundle, codegen, disasm
from tunegen.bundle import Bundle, BundleEntry, BundleImage, write_bundle
from tunegen.bundle.compatibility import PTX_DRIVERS
from tunegen.bundle.manifest import decode, encode
from tunegen.compiler import NvrtcCompiler
from tunegen.errors import BundleError, PlanError, UsageError
from tunegen.kernels import matmul_naive
from tunegen.model import (
    SM_COUNT,
    Argument,
    CompiledKernel,
    DeviceIdentity,
    KernelImage,
    LaunchPlan,
    Limit,
    Measurement,
    Resources,
    TensorMap,
    TuningRecord,
)
from tunegen.perfmodel import default_chip

SMALL = {"matmul": "64x96x128"}
NAMES = [f"{spec.operation.name}-{spec.name}" for spec in PORTABLE]
per_spec = pytest.mark.parametrize("spec", PORTABLE, ids=NAMES)


def choose(spec, **attributes):
    """A small problem of a spec, and the lowest target's default: it compiles for all."""
    size = SMALL.get(spec.operation.name, "4096")
    problem = spec.operation.problem(size, **attributes)
    return problem, spec.default(problem, default_chip("sm_75"))


# --- entries that need no compiler ---------------------------------------------------------------


def fake(source, target, *, shared=0, isa="9.0", nvrtc="13.0", cubin=b"\x7fELF "):
    """A kernel as the compiler would hand it over, with made-up code."""
    return CompiledKernel(
        name=source.name,
        entry=source.entry,
        target=target,
        ptx=f"//\n.version {isa}\n.target {target}\n.address_size 64\n".encode(),
        cubin=cubin + target.encode(),
        resources=Resources(32, 0, 0, 0, shared),
        warnings="",
        rejection="",
        nvrtc=nvrtc,
        seconds=0.1,
        from_cache=False,
    )


def entry_for(targets, floor="sm_80", *, spec=matmul_naive.SPEC, config=None, **kernel):
    problem, default = choose(spec)
    config = config or default
    sources = codegen.render(spec, config, problem, "sm_90")
    images = tuple(
        BundleImage(
            tuple(fake(source, target, **kernel) for source in sources),
            "default, unmeasured",
            "built",
        )
        for target in targets
    )
    lowest = tuple(fake(source, floor, **kernel) for source in sources) if floor else ()
    return BundleEntry(spec, problem, config, sources, images, lowest)


def opened(folder, *entries) -> tuple[Bundle, bundle.Entry]:
    write_bundle(folder, entries, tunegen_version="1.2.3")
    made = Bundle.open(folder)
    return made, made.manifest.entries[0]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def one(tmp_path):
    """A bundle of one entry with two images and PTX."""
    return opened(tmp_path / "bundle", entry_for(["sm_80", "sm_90"]))[0]


def edit(folder: Path, change) -> None:
    """Change the manifest as JSON, and its line in SHA256SUMS."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


# --- real kernels --------------------------------------------------------------------------------


@functools.cache
def built(spec, targets=("sm_80", "sm_90"), floor="sm_75") -> BundleEntry:
    problem, config = choose(spec)
    sources = codegen.render(spec, config, problem, "sm_75")
    compiler = NvrtcCompiler()

    def compile_all(target):
        return tuple(compiler.compile(source, target) for source in sources)

    images = tuple(
        BundleImage(compile_all(spec.target(arch)), "default, unmeasured", "built")
        for arch in targets
    )
    return BundleEntry(spec, problem, config, sources, images, compile_all(floor))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Every spec's default, compiled and written once."""
    folder = tmp_path_factory.mktemp("shipped") / "bundle"
    write_bundle(folder, [built(spec) for spec in PORTABLE], tunegen_version="1.2.3")
    return Bundle.open(folder)


@pytest.mark.nvrtc
def test_a_bundle_of_every_spec_is_whole(shipped):
    assert shipped.verify() == []
    assert len(shipped.manifest.entries) == len(PORTABLE)
    for entry in shipped.manifest.entries:
        assert [image.target for image in entry.images] == ["sm_80", "sm_90"]
        for image in entry.images:
            for kernel in image.kernels:
                cubin = shipped.read(kernel)
                assert f"sm_{disasm.cubin_capability(cubin)}" == image.target
                assert any(name == f".text.{kernel.entry}" for name in disasm.code_sections(cubin))


@pytest.mark.nvrtc
def test_nothing_of_the_place_enters_the_files(shipped, tmp_path):
    again = tmp_path / "elsewhere"
    write_bundle(again, [built(spec) for spec in reversed(PORTABLE)], tunegen_version="1.2.3")
    assert contents(again) == contents(shipped.folder)
    for name, body in contents(again).items():
        for word in (str(Path.home()), str(Path.cwd()), str(tmp_path), os.uname().nodename):
            assert word.encode() not in body, name


@pytest.mark.nvrtc
def test_a_fresh_compilation_gives_the_same_bundle(tmp_path):
    def write(folder):
        problem, config = choose(matmul_naive.SPEC)
        sources = codegen.render(matmul_naive.SPEC, config, problem, "sm_75")
        kernel = tuple(NvrtcCompiler().compile(source, "sm_75") for source in sources)
        image = BundleImage(kernel, "default, unmeasured", "built")
        entry = BundleEntry(matmul_naive.SPEC, problem, config, sources, (image,), kernel)
        write_bundle(folder, [entry], tunegen_version="1.2.3")
        return contents(folder)

    assert write(tmp_path / "first") == write(tmp_path / "second")


@pytest.mark.nvrtc
@pytest.mark.nvjitlink
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_ptx_floor_assembles(shipped, arch):
    from assembling import assemble

    for entry in shipped.manifest.entries:
        assert entry.ptx is not None
        assert entry.ptx.target == "sm_75"
        assert entry.ptx.min_driver == PTX_DRIVERS[entry.ptx.isa]
        for kernel in entry.ptx.kernels:
            cubin = assemble(shipped.read(kernel), arch)
            assert f"sm_{disasm.cubin_capability(cubin)}" == arch
            assert f".text.{kernel.entry}" in disasm.code_sections(cubin)


@pytest.mark.nvrtc
def test_line_information_is_not_shipped(tmp_path):
    entry = built(matmul_naive.SPEC)
    traced = tuple(
        NvrtcCompiler(lineinfo=True).compile(source, "sm_80") for source in entry.sources
    )
    for bad in (
        replace(entry, images=(BundleImage(traced, "default, unmeasured", "built"),)),
        replace(entry, floor=traced),
    ):
        with pytest.raises(BundleError, match="line information"):
            write_bundle(tmp_path / "out", [bad], tunegen_version="1")
    assert list(tmp_path.iterdir()) == []


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="sha256sum is not installed")
def test_sha256sum_agrees(one):
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"],
        cwd=one.folder,
        capture_output=True,
        check=True,
        text=True,
    )
    listed = {line.rsplit(":", 1)[0] for line in done.stdout.splitlines()}
    assert listed == set(contents(one.folder)) - {"SHA256SUMS"}


def test_the_manifest_describes_the_files(one):
    (entry,) = one.manifest.entries
    assert one.manifest.version == "1.2.3"
    problem, config = choose(matmul_naive.SPEC)
    assert (entry.operation, entry.spec, entry.dtype, entry.layout) == (
        "matmul", "naive", "fp32", "nn",
    )  # fmt: skip
    assert entry.problem == problem.names
    assert entry.config == dict(config)
    assert [operand.name for operand in entry.operands] == ["A", "B", "C"]
    assert set(entry.scalars) == {"alpha", "beta"}
    assert entry.limits == matmul_naive.SPEC.limits(config, problem)
    assert entry.plan == matmul_naive.SPEC.symbolic_plan(config, problem)
    (source,) = entry.sources
    text = (one.folder / source.file).read_bytes()
    assert hashlib.sha256(text).hexdigest() == source.sha256
    assert text.decode() == codegen.render(matmul_naive.SPEC, config, problem, "sm_90")[0].text
    assert [image.min_driver for image in entry.images] == ["580", "580"]
    assert set(contents(one.folder)) == {
        "LICENSE",
        "SHA256SUMS",
        "manifest.json",
        source.file,
        *(kernel.file for image in entry.images for kernel in image.kernels),
        *(kernel.file for kernel in entry.ptx.kernels),
    }


def test_the_manifest_is_canonical(one):
    content = (one.folder / "manifest.json").read_bytes()
    plain = json.loads(content)
    assert content.decode() == json.dumps(plain, indent=2, sort_keys=True) + "\n"
    assert encode(decode(content)) == content


def test_an_image_carries_the_facts_of_its_record(tmp_path):
    entry = entry_for(["sm_90"])
    problem, config = choose(matmul_naive.SPEC)
    record = TuningRecord(
        operation="matmul",
        spec="naive",
        arch="sm_90",
        target="sm_90",
        problem=problem,
        config=dict(config),
        device=DeviceIdentity(
            name="Some GPU", sm_count=7, shared_bytes_per_block=1, l2_bytes=1, memory_clock_mhz=1
        ),
        evidence="measured",
        measurement=Measurement(12.5, "burst"),
        default_us=None,
        images=(
            KernelImage(
                name="matmul_naive",
                source_digest="",
                cubin_sha256=hashlib.sha256(entry.images[0].kernels[0].cubin).hexdigest(),
                registers=32,
                spill_bytes=0,
                shared_bytes=0,
            ),
        ),
        limits=(),
        nvrtc="13.0",
        tunegen="1.2.3",
        created="",
        trials=1,
        seed=0,
        command="",
    )
    image = replace(entry.images[0], provenance="measured", status="verified", record=record)
    _, read = opened(tmp_path / "out", replace(entry, images=(image,)))
    assert (read.images[0].status, read.images[0].provenance) == ("verified", "measured")
    facts = read.images[0].record
    assert facts is not None
    assert (facts.median_us, facts.policy, facts.default_us) == (12.5, "burst", None)
    assert (facts.device, facts.sm_count) == ("Some GPU", 7)
    for wrong in (replace(image, status="built"), replace(image, record=None)):
        with pytest.raises(BundleError, match="does not go with its record"):
            write_bundle(tmp_path / "no", [replace(entry, images=(wrong,))], tunegen_version="1")


def test_other_attributes_and_configs_are_other_entries(tmp_path):
    spec = matmul_naive.SPEC
    entry = entry_for(["sm_90"])
    padded = spec.operation.problem("64x96x128", lda=256)
    made, _ = opened(tmp_path / "out", entry, replace(entry, problem=padded))
    names = [item.name for item in made.manifest.entries]
    assert len(set(names)) == 2
    assert all(name.startswith("matmul_naive_fp32_nn_64x96x128_") for name in names)
    with pytest.raises(BundleError, match="exported twice"):
        write_bundle(tmp_path / "out", [entry, entry], tunegen_version="1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: [], "nothing to export"),
        (lambda e: [replace(e, images=(), floor=())], "neither an image nor PTX"),
        (lambda e: [replace(e, sources=())], "lacks matmul_naive in its sources"),
        (lambda e: [replace(e, images=e.images * 2)], "two images for one target"),
        (
            lambda e: [replace(e, images=(replace(e.images[0], kernels=()),))],
            "lacks matmul_naive in its image",
        ),
        (lambda e: [replace(e, floor=(fake(e.sources[0], "sm_90a"),))], "runs nowhere else"),
        (lambda e: [replace(e, floor=(replace(e.floor[0], ptx=b""),))], "PTX of matmul_naive"),
        (lambda e: [replace(e, floor=(*e.floor, fake(e.sources[0], "sm_75")))], "mixes"),
        (
            lambda e: [replace(e, sources=(*e.sources, replace(e.sources[0], name="../x")))],
            "damaged manifest",
        ),
    ],
)
def test_entries_that_do_not_fit_together_are_refused(tmp_path, change, says):
    with pytest.raises(BundleError, match=re.escape(says)) as caught:
        write_bundle(tmp_path / "out", change(entry_for(["sm_90"])), tunegen_version="1")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_bundle_is_replaced(one):
    before = contents(one.folder)
    write_bundle(one.folder, [entry_for(["sm_90"], None)], tunegen_version="2")
    after = contents(one.folder)
    assert after.keys() < before.keys()
    assert Bundle.open(one.folder).manifest.version == "2"
    assert Bundle.open(one.folder).verify() == []
    assert [path.name for path in one.folder.parent.iterdir()] == ["bundle"]
    assert (
        one.folder.stat().st_mode & 0o777 == (one.folder.parent / "bundle").stat().st_mode & 0o777
    )


def test_the_folder_has_ordinary_permissions(tmp_path, one):
    (tmp_path / "plain").mkdir()
    assert one.folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_empty_and_missing_folders_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c", str(tmp_path / "text")):
        assert opened(folder, entry_for(["sm_90"]))[0].verify() == []


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"manifest.json": '{"name": "a web application"}'},
        {"manifest.json": "not json", "kernel.cu": ""},
    ],
)
def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, files):
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = contents(folder)
    with pytest.raises(BundleError, match="not empty and not a bundle"):
        write_bundle(folder, [entry_for(["sm_90"])], tunegen_version="1")
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_stranger_among_the_files_is_not_deleted(one):
    (one.folder / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"holds notes\.txt"):
        write_bundle(one.folder, [entry_for(["sm_90"])], tunegen_version="1")
    assert (one.folder / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BundleError, match="is not a folder"):
        write_bundle(tmp_path / "out", [entry_for(["sm_90"])], tunegen_version="1")
    with pytest.raises(BundleError, match="cannot be written"):
        write_bundle(tmp_path / "out" / "below", [entry_for(["sm_90"])], tunegen_version="1")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("fails", [0, 1])
def test_a_failed_write_leaves_the_earlier_bundle(one, monkeypatch, fails):
    before = contents(one.folder)
    calls = []

    def rename(old, new, real=os.rename):
        calls.append(old)
        if len(calls) == fails + 1:
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(BundleError, match="No space left"):
        write_bundle(one.folder, [entry_for(["sm_100"])], tunegen_version="2")
    assert contents(one.folder) == before
    assert [path.name for path in one.folder.parent.iterdir()] == ["bundle"]


# --- opening and verifying -----------------------------------------------------------------------


def test_a_folder_without_manifest_is_no_bundle(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BundleError, match=r"no bundle: manifest\.json"):
            Bundle.open(folder)


def _set(*path, to):
    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = to

    return change


ENTRY = ("entries", 0)
LAUNCH = (*ENTRY, "plan", "launches", 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set("schema", to=2), "schema 2"),
        (_set("schema", to="1"), "schema"),
        (_set("generator", to="webpack"), "generator"),
        (_set("colour", to="red"), "colour"),
        (_set(*ENTRY, "images", 0, "kernels", 0, "file", to="../../etc/passwd"), "file"),
        (_set(*ENTRY, "images", 0, "kernels", 0, "file", to="/etc/passwd"), "file"),
        (_set(*ENTRY, "images", 0, "kernels", 0, "sha256", to="beef"), "sha256"),
        (_set(*ENTRY, "images", 0, "target", to="gfx90a"), "target"),
        (_set(*ENTRY, "images", 0, "status", to="fine"), "status"),
        (_set(*ENTRY, "images", 0, "kernels", to=[]), "no matmul_naive for sm_80"),
        (_set(*ENTRY, "ptx", "kernels", to=[]), "no matmul_naive for sm_80"),
        (_set(*LAUNCH, "grid", 0, to="__import__('os')"), "not a size formula"),
        (_set(*LAUNCH, "grid", 0, to="(M + "), "not a size formula"),
        (_set(*LAUNCH, "grid", 0, to="M / 0"), "cannot be evaluated"),
        (_set(*LAUNCH, "grid", 0, to="P / 16"), "uses P"),
        (_set(*LAUNCH, "grid", to=[1, 1]), "grid"),
        (_set(*LAUNCH, "arguments", 0, "type", to="texture"), "type"),
        (_set(*ENTRY, "limits", 0, "rule", to="below"), "rule"),
        (lambda manifest: manifest["entries"].append(manifest["entries"][0]), "one name"),
        (lambda manifest: manifest["entries"][0].pop("plan"), "plan"),
    ],
)
def test_a_damaged_manifest_is_refused_in_one_line(one, change, says):
    edit(one.folder, change)
    with pytest.raises(BundleError, match=re.escape(says)) as caught:
        Bundle.open(one.folder)
    assert "\n" not in str(caught.value)
    assert "manifest.json" in str(caught.value)


def test_a_truncated_manifest_is_refused(one):
    content = encode(one.manifest).rstrip()

    @settings(max_examples=60, deadline=None)
    @given(length=st.integers(0, len(content) - 1))
    def check(length):
        with pytest.raises(BundleError, match="damaged manifest"):
            bundle.reader.check(content[:length])

    check()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", [".cubin", ".ptx", ".cu", "LICENSE"])
def test_tampering_is_found(one, kind):
    name = next(name for name in sorted(contents(one.folder)) if name.endswith(kind))
    _flip(one.folder / name)
    assert [str(finding) for finding in one.verify()] == [
        "SHA256SUMS: does not match LICENSE"
        if kind == "LICENSE"
        else f"{name}: its hash is not the manifest's"
    ]
    (one.folder / name).unlink()
    assert [finding.file for finding in one.verify()] == [
        "SHA256SUMS" if kind == "LICENSE" else name
    ]


def test_a_changed_manifest_no_longer_matches_the_sums(one):
    edit(one.folder, _set(*ENTRY, "images", 0, "provenance", to="measured"))
    assert [str(finding) for finding in Bundle.open(one.folder).verify()] == [
        "SHA256SUMS: does not match manifest.json"
    ]


def test_files_too_many_are_found(one):
    (one.folder / "extra").mkdir()
    (one.folder / "extra" / "evil.cubin").write_bytes(b"")
    (one.folder / "link").symlink_to("/etc/passwd")
    assert [str(finding) for finding in one.verify()] == [
        "extra/evil.cubin: not part of the bundle",
        "link: not part of the bundle",
    ]


@pytest.mark.parametrize(
    ("edit_sums", "says"),
    [
        (lambda text: "", "does not list"),
        (lambda text: text + f"{'0' * 64}  other\n", "lists other"),
        (lambda text: text.replace(text[:4], "0000", 1), "does not match"),
        (lambda text: "garbage\n", "cannot be read"),
    ],
)
def test_sums_that_do_not_agree_are_found(one, edit_sums, says):
    path = one.folder / "SHA256SUMS"
    path.write_text(edit_sums(path.read_text()))
    findings = one.verify()
    assert findings
    assert {finding.file for finding in findings} == {"SHA256SUMS"}
    assert all(says in finding.problem for finding in findings)


def test_reading_checks_the_hash(one):
    kernel = one.manifest.entries[0].images[0].kernels[0]
    assert one.read(kernel) == (one.folder / kernel.file).read_bytes()
    _flip(one.folder / kernel.file)
    with pytest.raises(BundleError, match="not the file in the manifest"):
        one.read(kernel)
    (one.folder / kernel.file).unlink()
    with pytest.raises(BundleError, match="No such file"):
        one.read(kernel)


# --- entries and targets -------------------------------------------------------------------------


def test_entries_are_found_by_what_they_compute(tmp_path):
    fill = next(spec for spec in PORTABLE if spec.operation.name != "matmul")
    made, _ = opened(tmp_path / "out", entry_for(["sm_90"]), entry_for(["sm_90"], spec=fill))
    assert made.entry("matmul").operation == "matmul"
    assert made.entry("matmul", dtype="fp32", layout="nn", spec="naive") == made.entry("matmul")
    assert made.entry(fill.operation.name).spec == fill.name
    for wrong, says in [
        ({"operation": "matmull"}, "did you mean matmul"),
        ({"operation": "matmul", "dtype": "fp64"}, "known: fp32"),
        ({"operation": "matmul", "layout": "tn"}, "known: nn"),
        ({"operation": "matmul", "spec": "simd"}, "known: naive"),
        ({"operation": "matmul", "name": "x"}, "known: matmul_naive_fp32"),
    ]:
        with pytest.raises(UsageError, match=says):
            made.entry(**wrong)


def test_several_entries_are_never_chosen_from_silently(tmp_path):
    entry = entry_for(["sm_90"])
    other = replace(entry, problem=entry.spec.operation.problem("8x8x8"))
    made, first = opened(tmp_path / "out", entry, other)
    with pytest.raises(BundleError, match="2 entries fit") as caught:
        made.entry("matmul")
    assert first.name in caught.value.hint
    assert made.entry("matmul", name=first.name) == first


@pytest.mark.parametrize("target", ["sm_91", "sm_90a", "sm90", "H100", "", "default"])
def test_an_unknown_target_is_an_error_that_names_the_known_ones(one, target):
    (entry,) = one.manifest.entries
    with pytest.raises(UsageError, match="sm_80, sm_90"):
        one.image(entry, target)
    assert one.image(entry, "sm_90").target == "sm_90"


# --- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "floor", "arch", "driver", "chosen"),
    [
        # Its own capability comes first, whatever else would do.
        (["sm_80", "sm_86", "sm_90"], "sm_80", "sm_86", None, ("cubin", "sm_86")),
        (["sm_90a"], None, "sm_90", "580.65.06", ("cubin", "sm_90a")),
        # A lower minor of the same major, the nearest one.
        (["sm_80", "sm_86"], "sm_80", "sm_89", "580", ("cubin", "sm_86")),
        (["sm_120"], "sm_120", "sm_121", None, ("cubin", "sm_120")),
        # Never a higher minor, another major, a suffix, or to and from embedded chips.
        (["sm_89"], "sm_80", "sm_86", "580", ("ptx", "sm_80")),
        (["sm_80"], "sm_80", "sm_90", "580", ("ptx", "sm_80")),
        (["sm_100a"], "sm_80", "sm_103", "580", ("ptx", "sm_80")),
        (["sm_100f"], "sm_80", "sm_103", "580", ("ptx", "sm_80")),
        (["sm_80", "sm_86"], "sm_80", "sm_87", "580", ("ptx", "sm_80")),
        (["sm_87"], "sm_80", "sm_89", "580", ("ptx", "sm_80")),
        # A device newer than this release.
        (["sm_80"], "sm_80", "sm_150", "700.1", ("ptx", "sm_80")),
        ([], "sm_75", "sm_75", None, ("ptx", "sm_75")),
    ],
)
def test_the_best_image_that_runs_is_chosen(tmp_path, targets, floor, arch, driver, chosen):
    made, entry = opened(tmp_path / "out", entry_for(targets, floor))
    selection = made.select(entry, arch, driver)
    assert (selection.kind, selection.target) == chosen
    assert chosen[1] in selection.reason
    assert all(kernel.file.endswith(selection.kind) for kernel in selection.kernels)
    assert all(made.read(kernel) for kernel in selection.kernels)


@pytest.mark.parametrize(
    ("targets", "floor", "arch", "driver", "says"),
    [
        (["sm_90"], None, "sm_86", None, ["sm_86", "sm_90 does not run", "no PTX"]),
        (["sm_90"], "sm_90", "sm_86", None, ["PTX for sm_90 does not run on sm_86"]),
        (["sm_90"], "sm_90", "sm_90", "575.51.03", ["575.51.03", "driver from 580 on"]),
        (["sm_90a"], None, "sm_100", "580", ["sm_90a does not run on sm_100"]),
    ],
)
def test_nothing_that_fits_is_an_error_naming_both(tmp_path, targets, floor, arch, driver, says):
    made, entry = opened(tmp_path / "out", entry_for(targets, floor))
    with pytest.raises(BundleError) as caught:
        made.select(entry, arch, driver)
    for words in says:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ptx_newer_than_the_driver_is_not_used(tmp_path):
    made, entry = opened(tmp_path / "out", entry_for(["sm_80"], "sm_80", isa="9.1"))
    # Minor version compatibility: the cubin loads where the PTX of the same toolkit does not.
    assert made.select(entry, "sm_80", "580.65.06").kind == "cubin"
    with pytest.raises(BundleError, match=r"580\.65\.06.*version 9\.1, which needs .* 590"):
        made.select(entry, "sm_90", "580.65.06")
    assert made.select(entry, "sm_90", "590.44.01").kind == "ptx"


def test_ptx_of_an_unknown_version_needs_an_unknown_driver(tmp_path):
    made, entry = opened(tmp_path / "out", entry_for(["sm_80"], "sm_80", isa="12.3"))
    assert entry.ptx.min_driver == ""
    assert made.select(entry, "sm_90").kind == "ptx"
    with pytest.raises(BundleError, match=r"version 12\.3"):
        made.select(entry, "sm_90", "999")


def with_dynamic_shared(shared_bytes):
    """The naive spec, asking for shared memory at launch."""

    def plan(config, problem, sizes):
        made = matmul_naive.SPEC.plan(config, problem, sizes)
        launches = tuple(replace(launch, shared_bytes=shared_bytes) for launch in made.launches)
        return replace(made, launches=launches)

    return replace(matmul_naive.SPEC, plan=plan)


@pytest.mark.parametrize(
    ("dynamic", "static", "fits"),
    [
        (200 * 1024, 0, {"sm_80": False, "sm_86": False, "sm_90": True, "sm_120": False}),
        (150 * 1024, 13 * 1024, {"sm_80": True, "sm_86": False, "sm_90": True, "sm_120": False}),
        (150 * 1024, 13 * 1024 + 1, {"sm_80": False, "sm_90": True}),
        (99 * 1024, 0, {"sm_75": False, "sm_86": True, "sm_89": True, "sm_120": True}),
    ],
)
def test_shared_memory_that_a_device_lacks(tmp_path, dynamic, static, fits):
    entry = entry_for(
        ["sm_75", "sm_80"], "sm_75", spec=with_dynamic_shared(dynamic), shared=static
    )
    made, read = opened(tmp_path / "out", entry)
    for arch, expected in fits.items():
        if expected:
            assert made.select(read, arch).kernels
            continue
        limit = default_chip(arch).shared_bytes_per_block
        with pytest.raises(BundleError, match=f"{dynamic + static} bytes.*{arch} has {limit}"):
            made.select(read, arch)


def test_bad_device_names_and_drivers_are_usage(one):
    (entry,) = one.manifest.entries
    for arch in ("sm_90a", "H200", "90"):
        with pytest.raises(UsageError):
            one.select(entry, arch)
    with pytest.raises(UsageError, match="malformed driver"):
        one.select(entry, "sm_80", "latest")


# --- plans ---------------------------------------------------------------------------------------


def problems(spec):
    """Problems of a spec, empty ones included, with sizes of all magnitudes."""
    operation = spec.operation
    size = st.one_of(st.integers(0, 70), st.integers(0, 20000))
    count = len(operation.axes) + bool(operation.batch_axis)
    sizes = st.tuples(*[size] * count)
    return st.builds(
        lambda numbers, dtype, layout: operation.problem(numbers, dtype=dtype, layout=layout),
        sizes,
        st.just(operation.dtypes[0]),
        st.just(operation.layouts[0]),
    )


@per_spec
def test_the_plan_of_a_bundle_is_the_plan_of_the_spec(spec, tmp_path):
    made, entry = opened(tmp_path / "out", entry_for(["sm_90"], spec=spec))
    chip = default_chip("sm_90")
    _, config = choose(spec)

    @settings(max_examples=60, deadline=None)
    @given(problem=problems(spec))
    def check(problem):
        sizes = problem.names
        if all(limit.holds(sizes) for limit in entry.limits):
            try:
                expected = spec.bound_plan(config, problem, chip)
            except PlanError:  # more blocks than a grid holds
                with pytest.raises(PlanError):
                    made.plan(entry, sizes, sm_count=chip.sm_count)
                return
            assert made.plan(entry, sizes, sm_count=chip.sm_count) == expected
        else:
            with pytest.raises(BundleError, match="needs"):
                made.plan(entry, sizes, sm_count=chip.sm_count)

    check()


def test_an_empty_problem_launches_nothing(one):
    (entry,) = one.manifest.entries
    problem = matmul_naive.SPEC.operation.problem("0x96x128")
    assert one.plan(entry, problem.names).launches == ()


A_MAP = {
    "name": "a_map", "array": "A", "dtype": "fp32", "extents": ["K", "M"], "strides": ["4 * lda"],
    "box": [32, 128], "swizzle": 128, "l2_promotion": 256, "offset": "16 * M",
}  # fmt: skip


def with_tensor_map(grid=None, **changes):
    """The naive spec, with A through a tensor map."""
    fields = {**A_MAP, **changes}
    for name in ("extents", "strides", "box"):
        fields[name] = tuple(fields[name])

    def plan(config, problem, sizes):
        (launch,) = matmul_naive.SPEC.plan(config, problem, sizes).launches
        arguments = (Argument("a_map", "tensor_map"), *launch.arguments)
        launch = replace(launch, arguments=arguments, grid=grid or launch.grid)
        return LaunchPlan((launch,), tensor_maps=(TensorMap(**fields),))

    return replace(matmul_naive.SPEC, plan=plan)


def test_tensor_maps_are_shipped_as_formulas(tmp_path):
    spec = with_tensor_map()
    made, entry = opened(tmp_path / "out", entry_for(["sm_90"], spec=spec))
    manifest = json.loads((made.folder / "manifest.json").read_text())
    plan = manifest["entries"][0]["plan"]
    assert plan["tensor_maps"] == [A_MAP]
    first = {"name": "a_map", "type": "tensor_map", "value": 0}
    assert plan["launches"][0]["arguments"][0] == first
    schema = bundle.manifest_schema()
    assert conforms(manifest, schema, schema)
    problem = spec.operation.problem("100x64x72")
    shipped = made.plan(entry, problem.names)
    assert shipped == spec.bound_plan(choose(spec)[1], problem, default_chip("sm_90"))
    assert shipped.tensor_maps[0].extents == (72, 100)
    assert shipped.tensor_maps[0].strides == (4 * 72,)
    assert shipped.tensor_maps[0].offset == 1600
    with pytest.raises(PlanError, match="a_map has a stride of 292 bytes"):
        made.plan(entry, spec.operation.problem("100x64x73").names)
    with pytest.raises(BundleError, match="needs lda, which is not given"):
        made.plan(entry, {name: n for name, n in problem.names.items() if name != "lda"})


def with_programmatic_launch():
    def plan(config, problem, sizes):
        (launch,) = matmul_naive.SPEC.plan(config, problem, sizes).launches
        return LaunchPlan((replace(launch, programmatic=True),))

    return replace(matmul_naive.SPEC, plan=plan)


def test_programmatic_launches_are_shipped_and_older_manifests_have_plain_ones(tmp_path):
    spec = with_programmatic_launch()
    made, entry = opened(tmp_path / "out", entry_for(["sm_90"], spec=spec))
    names = spec.operation.problem("100x64x72").names
    assert [launch.programmatic for launch in made.plan(entry, names).launches] == [True]

    def forget(manifest):
        assert manifest["entries"][0]["plan"]["launches"][0].pop("programmatic") is True

    edit(made.folder, forget)
    older = Bundle.open(made.folder)
    (entry,) = older.manifest.entries
    assert [launch.programmatic for launch in older.plan(entry, names).launches] == [False]


def test_the_schema_says_how_to_encode_a_tensor_map():
    described = bundle.manifest_schema()["$defs"]["TensorMap"]["description"]
    for word in ("cuTensorMapEncodeTiled", "globalAddress", "globalDim", "globalStrides", "boxDim",
                 "swizzle", "l2_promotion", "elementStrides", "UINT16"):  # fmt: skip
        assert word in described


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"array": "D"}, "tensor map a_map is of D, which is no operand"),
        ({"name": "b_map"}, "matmul_naive takes the tensor map a_map, the plan has b_map"),
        ({"swizzle": 100}, "tensor map a_map has swizzle 100"),
        ({"extents": ["K", "P"]}, "it uses P"),
        ({"array": "workspace"}, "into a workspace of 0"),
        ({"box": ["M", 1]}, "box"),
        # Of a persistent kernel with clusters, too.
        ({"grid": (f"min(M, {SM_COUNT} / 16)", 1, 1), "name": "b_map"}, "the plan has b_map"),
    ],
)
def test_tensor_maps_that_fit_nothing_are_refused(tmp_path, change, says):
    with pytest.raises(BundleError, match=says):
        opened(tmp_path / "out", entry_for(["sm_90"], spec=with_tensor_map(**change)))


def test_limits_are_checked_before_anything_else(tmp_path):
    limits = (Limit("K", "multiple_of", 8), Limit("A", "multiple_of", 16))  # K and an address
    spec = replace(matmul_naive.SPEC, limits=lambda config, problem: limits)
    made, entry = opened(tmp_path / "out", entry_for(["sm_90"], spec=spec))
    sizes = choose(spec)[0].names
    with pytest.raises(BundleError, match="needs A a multiple of 16: A is not given"):
        made.plan(entry, sizes)
    with pytest.raises(BundleError, match="A is 4104"):
        made.plan(entry, {**sizes, "A": 4104})
    with pytest.raises(BundleError, match="needs K a multiple of 8: K is 100"):
        made.plan(entry, {**sizes, "A": 4096, "K": 100})
    assert made.plan(entry, {**sizes, "A": 4096}).launches


def test_sizes_that_are_missing_or_impossible(one, tmp_path):
    (entry,) = one.manifest.entries
    sizes = choose(matmul_naive.SPEC)[0].names
    with pytest.raises(BundleError, match="needs lda, which is not given"):
        one.plan(entry, {name: size for name, size in sizes.items() if name != "lda"})
    with pytest.raises(BundleError, match="M is -1"):
        one.plan(entry, {**sizes, "M": -1})
    with pytest.raises(PlanError, match="blocks in x"):
        one.plan(entry, {**sizes, "M": 2**30, "N": 2**30})

    def persistent(config, problem, symbols):
        plan = matmul_naive.SPEC.plan(config, problem, symbols)
        return replace(plan, launches=(replace(plan.launches[0], grid=(SM_COUNT, 1, 1)),))

    spec = replace(matmul_naive.SPEC, plan=persistent)
    made, entry = opened(tmp_path / "persistent", entry_for(["sm_90"], spec=spec))
    assert made.plan(entry, sizes, sm_count=132).launches[0].grid == (132, 1, 1)
    with pytest.raises(BundleError, match="needs SM_COUNT, which is not given"):
        made.plan(entry, sizes)


# --- the schema ----------------------------------------------------------------------------------


def conforms(value, schema, root) -> bool:
    """Whether ``value`` follows a JSON schema, as far as the manifest's uses the language."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return conforms(value, root["$defs"][name], root)
    if "anyOf" in schema:
        return any(conforms(value, choice, root) for choice in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
        "null": type(None), "boolean": bool,
    }  # fmt: skip
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        rest = schema.get("items")
        return all(
            conforms(item, first[i] if i < len(first) else rest, root)
            for i, item in enumerate(value)
            if i < len(first) or rest
        )
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        if not set(schema.get("required", [])) <= value.keys():
            return False
        return all(
            conforms(item, properties[key], root)
            if key in properties
            else rest is None or (rest is not False and conforms(item, rest, root))
            for key, item in value.items()
        )
    return True


def test_a_written_manifest_follows_the_published_schema(one):
    schema = bundle.manifest_schema()
    manifest = json.loads((one.folder / "manifest.json").read_text())
    assert conforms(manifest, schema, schema)
    json.dumps(schema)
    for change in (
        _set("colour", to="red"),
        _set("schema", to="1"),
        _set(*ENTRY, "images", 0, "status", to="fine"),
        _set(*ENTRY, "images", 0, "kernels", 0, "file", to="../x"),
        _set(*LAUNCH, "grid", to=[1, 1]),
        lambda damaged: damaged["entries"][0].pop("plan"),
    ):
        damaged = json.loads(json.dumps(manifest))
        change(damaged)
        assert not conforms(damaged, schema, schema)


# --- drivers -------------------------------------------------------------------------------------


def test_minimum_drivers():
    source = codegen.render(*_naive())[0]
    assert bundle.min_driver(fake(source, "sm_90", nvrtc="13.5")) == "580"
    assert bundle.min_driver(fake(source, "sm_90", nvrtc="14.0")) == ""
    assert bundle.ptx_min_driver("9.0") == "580"
    assert bundle.ptx_min_driver("99.0") == ""
    # A later PTX version never runs on an earlier driver.
    by_version = sorted(PTX_DRIVERS, key=lambda isa: tuple(map(int, isa.split("."))))
    drivers = [int(PTX_DRIVERS[isa]) for isa in by_version]
    assert drivers == sorted(set(drivers))


def _naive():
    problem, config = choose(matmul_naive.SPEC)
    return matmul_naive.SPEC, config, problem, "sm_90"
