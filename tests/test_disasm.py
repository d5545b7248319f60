# SPDX-License-Identifier: Apache-2.0
"""PTX and SASS read back: annotation, code identity, loops, lint and differences."""

from __future__ import annotations

import contextlib
import functools
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taken import PORTABLE

from tunegen import codegen, disasm, kernels
from tunegen.compiler import NvrtcCompiler
from tunegen.disasm import tool
from tunegen.disasm.annotate import interleave_sass
from tunegen.disasm.flow import Instruction, natural_loops
from tunegen.disasm.ptx import ptx_kind
from tunegen.disasm.sass import parse_sass
from tunegen.errors import ToolkitError
from tunegen.model import CompiledKernel, KernelSource
from tunegen.perfmodel import default_chip

SMALL = {"matmul": "64x96x128"}
NAMES = [f"{spec.operation.name}-{spec.name}" for spec in PORTABLE]
per_spec = pytest.mark.parametrize("spec", PORTABLE, ids=NAMES)


@functools.cache
def source_of(spec, dtype, arch="sm_90"):
    problem = spec.operation.problem(SMALL.get(spec.operation.name, "4096"), dtype=dtype)
    config = spec.default(problem, default_chip(arch))
    return codegen.render(spec, config, problem, arch)[0]


@functools.cache
def compiled(source: KernelSource, target: str, lineinfo: bool = False) -> CompiledKernel:
    return NvrtcCompiler(lineinfo=lineinfo).compile(source, target)


@functools.cache
def listing(spec) -> str:
    """SASS of a spec's default with line information: nvdisasm takes half a second a call."""
    traced = compiled(source_of(spec, "fp32"), spec.target("sm_90"), lineinfo=True)
    return disasm.disassemble(traced.cubin, line_info=True)


def written(text: str, name: str = "k") -> KernelSource:
    return KernelSource(name, f"tunegen_{name}", text, "")


def statements(ptx: str) -> list[str]:
    """Lines of PTX without comments, directives for debuggers and blank lines."""
    ptx = re.sub(r"\.section\s+\.debug_\w+\s*\{[^}]*\}", "", ptx)
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    return [line for line in lines if line and not re.match(r"\.(loc|file)\b", line)]


# --- cubins --------------------------------------------------------------------------------------


@pytest.mark.nvrtc
@per_spec
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_line_information_changes_the_cubin_but_not_its_code(spec, arch):
    source = source_of(spec, "fp16", arch)
    plain = compiled(source, spec.target(arch)).cubin
    traced = compiled(source, spec.target(arch), lineinfo=True).cubin
    assert plain != traced
    assert disasm.same_code(plain, traced)
    assert disasm.code_digest(plain) == disasm.code_digest(traced)


@pytest.mark.nvrtc
def test_other_code_is_told_apart():
    spec = PORTABLE[0]
    half = compiled(source_of(spec, "fp16"), "sm_90").cubin
    assert not disasm.same_code(half, compiled(source_of(spec, "fp32"), "sm_90").cubin)
    assert not disasm.same_code(half, compiled(source_of(spec, "fp16", "sm_80"), "sm_80").cubin)
    text = next(body for name, body in disasm.code_sections(half).items() if ".text." in name)
    at = half.index(text)
    changed = half[:at] + bytes([half[at] ^ 1]) + half[at + 1 :]
    assert not disasm.same_code(half, changed)
    assert disasm.code_digest(half) != disasm.code_digest(changed)


@pytest.mark.nvrtc
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_100a", "sm_121"])
def test_a_cubin_says_what_it_was_assembled_for(target):
    source = written('extern "C" __global__ void tunegen_k(float* y) { *y = 1; }')
    assert f"sm_{disasm.cubin_capability(compiled(source, target).cubin)}" == target.rstrip("a")


@pytest.mark.nvrtc
def test_shared_memory_is_part_of_the_code():
    def kernel(words):
        return compiled(
            written(
                'extern "C" __global__ void tunegen_k(float* y, int i) {'
                f"__shared__ float tile[{words}];"
                "tile[threadIdx.x] = y[i]; __syncthreads(); y[0] = tile[i]; }"
            ),
            "sm_90",
        ).cubin

    small, large = disasm.code_sections(kernel(64)), disasm.code_sections(kernel(128))
    assert {name for name in small if small[name] != large[name]} == {".nv.shared.tunegen_k"}


@pytest.mark.nvrtc
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_cubin_is_an_error_of_ours(data):
    cubin = bytearray(compiled(source_of(PORTABLE[0], "fp32"), "sm_90").cubin)
    if data.draw(st.booleans()):
        del cubin[data.draw(st.integers(0, len(cubin) - 1)) :]
    else:
        table = struct.unpack_from("<Q", cubin, 40)[0]
        at = data.draw(st.integers(0, 63) | st.integers(table, len(cubin) - 1))
        cubin[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ToolkitError):  # or nothing that matters was hit
        disasm.code_sections(bytes(cubin))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + bytes(80), b"\x7fELF\x02\x01" + bytes(80)]
)
def test_what_is_no_cubin_is_refused(content):
    with pytest.raises(ToolkitError, match="not a cubin"):
        disasm.code_sections(content)
    with pytest.raises(ToolkitError, match="not a cubin"):
        disasm.cubin_capability(content)


# --- annotation ----------------------------------------------------------------------------------

SOURCE = """\
float outer(float x) {
  // Twice, for good measure.
  // Really.
  return inner(x) + inner(x);
}
float inner(float x) { return square(x); }
float square(float x) { return x * x; }
void kernel(float* y) {
  *y = outer(*y);
}
"""
PTX = """\
.version 9.0
.target sm_90

.visible .entry k(
\t.param .u64 p
)
{
\t.reg .f32 \t%f<9>;
\t.loc\t1 8 0


\tld.param.u64 %rd1, [p];
\t.loc\t1 9 3
\tld.global.f32 %f1, [%rd1];
\t.loc\t1 9 3
\t.loc\t1 4 3, function_name $L__info_string0, inlined_at 1 9 3
\t.loc\t1 6 3, function_name $L__info_string1, inlined_at 1 4 3
\t.loc\t1 7 3, function_name $L__info_string2, inlined_at 1 6 3
\t// begin inline asm
\tmul.f32 %f2, %f1, %f1;
\t// end inline asm
\t.loc\t1 7 3, function_name $L__info_string2, inlined_at 1 6 3
\tmul.f32 %f3, %f1, %f1;
$L__BB0_1:
\t.loc\t1 4 3, function_name $L__info_string0, inlined_at 1 9 3
\tadd.f32 %f4, %f2, %f3;
\t.loc\t1 0 3
\tmov.f32 %f5, %f4;
\t.loc\t1 9 3
\tst.global.f32 [%rd1], %f5;
\t.loc\t2 77 3
\tret;
}
\t.file\t1 "/somewhere/k.cu"
\t.section\t.debug_str
\t{
$L__info_string0:
.b8 95,90,55

\t}
"""
ANNOTATED = """\
.version 9.0
.target sm_90

.visible .entry k(
\t.param .u64 p
)
{
\t.reg .f32 \t%f<9>;

//    8 | void kernel(float* y) {
\tld.param.u64 %rd1, [p];
//    9 |   *y = outer(*y);
\tld.global.f32 %f1, [%rd1];
//    2 |>   // Twice, for good measure.
//    3 |>   // Really.
//    4 |>   return inner(x) + inner(x);
//    6 |>> float inner(float x) { return square(x); }
//    7 |>>> float square(float x) { return x * x; }
\tmul.f32 %f2, %f1, %f1;
\tmul.f32 %f3, %f1, %f1;
$L__BB0_1:
//    4 |>   return inner(x) + inner(x);
\tadd.f32 %f4, %f2, %f3;
// ---- | no single source line
\tmov.f32 %f5, %f4;
//    9 |   *y = outer(*y);
\tst.global.f32 [%rd1], %f5;
// ---- | no single source line
\tret;
}
"""


def test_ptx_stands_under_its_source_lines():
    assert disasm.annotate_ptx(PTX, SOURCE) == ANNOTATED


def test_annotating_twice_changes_nothing_more():
    assert disasm.annotate_ptx(ANNOTATED, SOURCE) == ANNOTATED


def test_line_numbers_beyond_the_source_show_nothing():
    shown = disasm.annotate_ptx(PTX, "one line\n")
    assert statements(shown) == statements(PTX)
    assert "|" not in shown.replace("// ---- |", "")


@pytest.mark.nvrtc
@per_spec
def test_annotated_ptx_has_the_instructions_of_the_plain_build(spec):
    source = source_of(spec, "bf16")
    target = spec.target("sm_90")
    traced = compiled(source, target, lineinfo=True).ptx.decode()
    shown = disasm.annotate_ptx(traced, source.text)
    assert statements(shown) == statements(compiled(source, target).ptx.decode())
    lines = source.text.splitlines()
    named = {int(line) for line in re.findall(r"^// +(\d+) \|", shown, re.MULTILINE)}
    assert {int(line) for line in re.findall(r"\.loc\s+1 ([1-9]\d*)", traced)} <= named
    for number, text in re.findall(r"^// +(\d+) \|>* ?(.*)$", shown, re.MULTILINE):
        assert lines[int(number) - 1].rstrip() == text
    for noise in (".loc", ".file", ".section", "inline asm"):
        assert noise not in shown


@pytest.mark.nvrtc
def test_comments_of_the_source_are_shown():
    source = source_of(kernels.specs_of("matmul", only="naive")[0], "fp32")
    shown = disasm.annotate_ptx(compiled(source, "sm_90", lineinfo=True).ptx.decode(), source.text)
    assert re.search(r"^// +\d+ \| +// Blocks lie along x only", shown, re.MULTILINE)


SASS = """\
\t.target\tsm_90
//--------------------- .text.k          --------------------------
\t.section\t.text.k,"ax",@progbits
        .global         k
k:
.text.k:
\t//## File "/somewhere/k.cu", line 8
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/somewhere/k.cu", line 7 inlined at "/somewhere/k.cu", line 9
\t//## File "/somewhere/k.cu", line 9
        /*0010*/                   FMUL R2, R1, R1 ;
.L_x_1:
\t//## File "/somewhere/k.cu", line 9
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
"""


def test_sass_stands_under_its_source_lines():
    assert interleave_sass(SASS, SOURCE).splitlines() == [
        "k:",
        "//    8 | void kernel(float* y) {",
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;",
        "//    9 |   *y = outer(*y);",
        "//    7 |> float square(float x) { return x * x; }",
        "        /*0010*/                   FMUL R2, R1, R1 ;",
        ".L_x_1:",
        "//    9 |   *y = outer(*y);",
        "        /*0020*/              @!P0 BRA `(.L_x_1) ;",
        "        /*0030*/                   EXIT ;",
    ]


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@per_spec
def test_annotated_sass_has_every_instruction(spec):
    shown = interleave_sass(listing(spec), source_of(spec, "fp32").text)
    instruction = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ .*", re.MULTILINE)
    printed = [line.rstrip() for line in instruction.findall(listing(spec))]
    assert printed == instruction.findall(shown)
    assert len(re.findall(r"^// +\d+ \|", shown, re.MULTILINE)) > 5
    assert "//##" not in shown


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
def test_a_cubin_with_line_information_is_annotated():
    source = written('extern "C" __global__ void tunegen_k(float* y) {\n  *y = 1;\n}')
    shown = disasm.annotate_sass(compiled(source, "sm_80", lineinfo=True).cubin, source.text)
    assert re.search(r"^//    2 \|   \*y = 1;\n.*STG", shown, re.MULTILINE | re.DOTALL)
    plain = disasm.annotate_sass(compiled(source, "sm_80").cubin, source.text)
    assert [line for line in shown.splitlines() if not line.startswith("//")] == plain.splitlines()


# --- nvdisasm ------------------------------------------------------------------------------------


@pytest.mark.nvdisasm
def test_what_nvdisasm_does_not_read_is_an_error_with_its_words():
    with pytest.raises(ToolkitError, match=r"nvdisasm failed: .*the cubin") as caught:
        disasm.disassemble(b"not a cubin")
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_tools(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tool, "WHEEL", "a-wheel-that-does-not-exist")


@pytest.mark.usefixtures("no_tools")
def test_a_missing_nvdisasm_names_the_wheel():
    with pytest.raises(ToolkitError, match="not installed") as caught:
        disasm.disassemble(b"")
    assert "pip install" in caught.value.hint


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_nvdisasm_of_an_installed_toolkit_is_found(variable, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "nvdisasm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho fake sass\n")
    program.chmod(0o755)
    monkeypatch.setenv(variable, str(program.parent if variable == "PATH" else tmp_path))
    assert disasm.find_nvdisasm() == program
    assert disasm.disassemble(b"") == "fake sass\n"
    program.chmod(0o644)
    with pytest.raises(ToolkitError, match="not installed"):
        disasm.find_nvdisasm()


# --- loops ---------------------------------------------------------------------------------------


def graphs():
    """Random control flow: from each instruction to any one or two others, or to none."""
    return st.integers(1, 12).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, n - 1), max_size=2, unique=True).map(sorted).map(tuple),
            min_size=n,
            max_size=n,
        )
    )


def reachable(edges, start, without=None):
    seen, stack = set(), [start] if start != without else []
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [target for target in edges[node] if target != without]
    return seen


@settings(max_examples=200, deadline=None)
@given(edges=graphs())
def test_loops_are_the_natural_loops_by_definition(edges):
    live = reachable(edges, 0)
    expected: dict[int, set[int]] = {}
    for tail in live:
        for header in edges[tail]:
            # The header dominates the tail: without it, the tail is out of reach.
            if tail == header or tail not in reachable(edges, 0, without=header):
                body = {header} | {
                    node for node in live if tail in reachable(edges, node, without=header)
                }
                expected.setdefault(header, set()).update(body)
    found = natural_loops([Instruction("X", targets) for targets in edges])
    assert {loop.header: set(loop.body) for loop in found} == expected


def sass(*lines: str) -> str:
    """A disassembly with offsets for the instructions among ``lines``."""
    offset, text = 0, ["k:", ".text.k:"]
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{offset:04x}*/                   {line} ;")
            offset += 16
    return "\n".join(text)


def test_a_slow_path_at_the_end_is_no_loop():
    found = disasm.facts(
        sass(
            "FFMA R0, R0, R0, R0", "@P0 BRA `(.L_slow)", ".L_back:", "STG.E desc[UR4][R2.64], R0",
            "EXIT", ".L_slow:", "MEMBAR.SC.GPU", "BRA `(.L_back)",
        )
    )  # fmt: skip
    assert found.loops == ()
    assert found.counts == {"FFMA": 1, "BRA": 2, "STG.32": 1, "EXIT": 1, "MEMBAR": 1}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("product", "hottest"),
    [("HGMMA.64x8x16.F32.BF16 R4, R8, R12, R4", ".L_products"),
     ("FFMA R4, R8, R12, R4", ".L_sums")],
)  # fmt: skip
def test_the_hottest_loop_is_that_of_the_tensor_cores(product, hottest, order):
    """Few of their instructions are much more work than many sums, wherever the loops stand."""
    products = (".L_products:", product, product, "@P0 BRA `(.L_products)")
    sums = (".L_sums:", *["FADD R4, R5, R6"] * 5, "@P0 BRA `(.L_sums)")
    found = disasm.facts(sass(*[line for loop in (products, sums)[::order] for line in loop],
                              "EXIT"))  # fmt: skip
    assert {loop.label: loop.arithmetic for loop in found.loops} == {
        ".L_products": 2,
        ".L_sums": 5,
    }
    assert {loop.tensor for loop in found.loops} == ({0, 2} if "HGMMA" in product else {0})
    assert found.hottest is not None
    assert found.hottest.label == hottest


def test_waiting_loops_do_not_hide_the_main_loop():
    found = disasm.facts(
        sass(
            ".L_tiles:", "MEMBAR.SC.GPU", ".L_main:", "MOV R4, RZ", ".L_wait:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11], R4", "@!P0 BRA `(.L_wait)",
            "HMMA.16816.F32 R4, R8, R12, R4", "ERRBAR", "BRA.U UP0, `(.L_main)",
            "STG.E.128 desc[UR4][R2.64], R0", "@P1 BRA `(.L_tiles)", "EXIT",
            ".L_trap:", "BRA `(.L_trap)",
        )
    )  # fmt: skip
    depths = {loop.label: (loop.depth, loop.inner) for loop in found.loops}
    assert depths == {".L_tiles": (1, False), ".L_main": (2, True), ".L_wait": (3, False)}
    assert found.hottest is not None
    assert found.hottest.label == ".L_main"
    assert found.hottest.arithmetic == 1
    assert [line.split(":")[0] for line in disasm.lint(found)] == [
        "1 ERRBAR in the inner loop at .L_main"
    ]


def test_a_main_loop_that_begins_with_its_wait_is_one_loop():
    found = disasm.facts(
        sass(
            ".L_main:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR11], R4", "@!P0 BRA `(.L_main)",
            "FFMA R4, R8, R12, R4", "@P1 BRA `(.L_main)", "EXIT",
        )
    )  # fmt: skip
    assert [(loop.label, loop.inner, loop.arithmetic) for loop in found.loops] == [
        (".L_main", True, 1)
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("LDG.E.U16.CONSTANT R1, desc[UR6][R2.64]", "LDG.16"),
        ("LDG.E.LTC128B.128 R4, desc[UR6][R2.64]", "LDG.128"),
        ("LDS.64 R2, [R4+0x10]", "LDS.64"),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR6][R2.64]", "LDGSTS.128"),
        ("STS R1, [R2]", "STS.32"),
        ("ST.E.S8 desc[UR4][R2.64], R0", "ST.8"),
        ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, gsb0", "HGMMA"),
        ("HFMA2.MMA R9, -RZ, RZ, 0, 0", "MOV"),
        ("HFMA2 R9, R1, R2, R9", "HFMA2"),
        ("HADD2.F32 R7, -RZ, R2.H0_H0", "HADD2.F32"),
        ("@!PT LDS RZ, [RZ]", "NOP"),
        ("@!UPT UIADD3 URZ, URZ, URZ, URZ", "NOP"),
    ],
)
def test_kinds_of_sass(line, kind):
    guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
    (function,) = parse_sass(f".text.k:\n        /*0000*/ {guard:>14} {rest} ;\n")
    assert function.code[0].kind == kind


@pytest.mark.parametrize(
    ("opcode", "operands", "kind"),
    [
        ("ld.global.nc.v4.f32", "{%f1, %f2, %f3, %f4}, [%rd1]", "LDG.128"),
        ("ld.global.L2::128B.v2.u64", "{%rd1, %rd2}, [%rd3]", "LDG.128"),
        ("ld.param.u64", "%rd1, [p]", "LDC"),
        ("st.shared::cta.u16", "[%r1], %rs1", "STS.16"),
        ("ld.local.f32", "%f1, [%rd1]", "LDL.32"),
        ("st.f64", "[%rd1], %fd1", "ST.64"),
        ("cp.async.cg.shared.global", "[%r1], [%rd1], 16, %r2", "LDGSTS.128"),
        ("cp.async.ca.shared.global", "[%r1], [%rd1], 4", "LDGSTS.32"),
        ("cp.async.commit_group", "", "DEPBAR"),
        ("cp.async.wait_group", "1", "DEPBAR"),
        ("cp.async.bulk.wait_group.read", "0", "DEPBAR"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", "[%r1]", "SYNCS"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "[%rd1], [%r1]", "UTMASTG"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile", "[%r1], [%rd1]", "UTMALDG"),
        ("fma.rn.f32", "%f1, %f2, %f3, %f4", "FFMA"),
        ("fma.rn.bf16x2", "%r1, %r2, %r3, %r4", "HFMA2"),
        ("sub.f64", "%fd1, %fd2, %fd3", "DADD"),
        ("mad.lo.s32", "%r1, %r2, %r3, %r4", "IMAD"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "{}", "HMMA"),
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "{}", "HGMMA"),
        ("wgmma.wait_group.sync.aligned", "0", "WARPGROUP"),
        ("barrier.sync.aligned", "0", "BAR"),
        ("membar.gl", "", "MEMBAR"),
        ("fence.acq_rel.gpu", "", "MEMBAR"),
        ("fence.proxy.async.shared::cta", "", "FENCE"),
        ("setp.lt.s32", "%p1, %r1, %r2", "SETP"),
    ],
)
def test_kinds_of_ptx(opcode, operands, kind):
    assert ptx_kind(opcode, operands) == kind


def test_ptx_scopes_labels_and_vectors():
    found = disasm.facts(
        ptx="""\
.version 9.0
.target sm_90
.global .align 4 .b8 table[4] = {1, 2, 3, 4};
.visible .entry k(.param .u64 p)
.maxntid 256, 1, 1
{
\t.reg .pred \t%p<3>;
$L__BB0_1:
\tmov.u32 %r2, 0;
\t{
.reg .pred q;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 q, [%r1], %r2;
@q bra DONE;
bra WAIT;
DONE:
}
\tld.shared.v4.f32 \t{%f1, %f2, %f3, %f4}, [%r3];
\tfma.rn.f32 %f5, %f1, %f2, %f5; fma.rn.f32 %f5, %f3, %f4, %f5;
\t{
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 q, [%r1], %r2;
@!q bra WAIT;
}
\t@%p1 bra \t$L__BB0_1;
\tret;
}
"""
    )
    assert found.level == "ptx"
    assert found.counts == {
        "BRA": 4, "EXIT": 1, "FFMA": 2, "LDS.128": 1, "MOV": 1, "SYNCS": 2,
    }  # fmt: skip
    assert [(loop.label, loop.depth, loop.inner) for loop in found.loops] == [
        ("$L__BB0_1", 1, True), ("WAIT", 2, False), ("WAIT", 2, False),
    ]  # fmt: skip


MAIN_LOOP = """\
extern "C" __global__ void tunegen_k(const float* x, float* y, int n, int* flag) {{
  __shared__ float tile[256];
  float sum = 0, kept[16] = {{}};
  for (int i = 0; i < n; ++i) {{
    tile[threadIdx.x] = x[i * 256 + threadIdx.x];
    __syncthreads();
    #pragma unroll 1
    for (int j = 0; j < 256; j += 4) {{
      const float4 v = *reinterpret_cast<const float4*>(&tile[j]);
      sum += v.x * v.y + v.z * v.w;
      {inner}
    }}
    __syncthreads();
    {outer}
  }}
  y[threadIdx.x] = sum + kept[n % 16];
}}
"""


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@pytest.mark.parametrize(
    ("target", "inner", "outer", "complaints"),
    [
        ("sm_90", "", "__threadfence(); *flag = i;", set()),
        ("sm_90", "__threadfence();", "", {"MEMBAR"}),
        ("sm_120", "__threadfence();", "", {"MEMBAR"}),
        ("sm_80", "kept[(j + n) % 16] += v.x;", "", {"LDL", "STL"}),
    ],
)
def test_lint_of_real_kernels(target, inner, outer, complaints):
    kernel = compiled(written(MAIN_LOOP.format(inner=inner, outer=outer)), target)
    found = disasm.facts(disasm.disassemble(kernel.cubin))
    named = {line.split()[1] for line in disasm.lint(found)}
    # A fence brings ERRBAR and CCTL along on some architectures.
    assert complaints <= named <= complaints | ({"ERRBAR", "CCTL"} if complaints else set())
    assert found.hottest is not None
    assert found.hottest.counts["LDS.128"]
    assert found.hottest.depth == 2
    assert "BAR" not in found.hottest.counts
    from_ptx = disasm.facts(ptx=kernel.ptx.decode())
    assert {line.split()[1] for line in disasm.lint(from_ptx)} == complaints
    assert from_ptx.hottest is not None
    assert from_ptx.hottest.counts["LDS.128"]


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
def test_a_fence_that_only_sass_shows_is_found():
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
    source = written(
        """\
extern "C" __global__ void tunegen_k(float* y, int n) {
  __shared__ __align__(8) unsigned long long full;
  const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(&full));
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    sum = sum * y[i] + 1;
"""
        f'    asm volatile("{arrive}" ::"r"(barrier));'
        "  }  y[threadIdx.x] = sum; }"
    )
    kernel = compiled(source, "sm_90")
    found = disasm.lint(disasm.facts(disasm.disassemble(kernel.cubin)))
    assert any(" MEMBAR in the inner loop" in line for line in found)
    assert disasm.lint(disasm.facts(ptx=kernel.ptx.decode())) == []


@pytest.mark.nvrtc
@pytest.mark.nvdisasm
@per_spec
def test_defaults_of_every_spec_pass_the_lint(spec):
    ptx = compiled(source_of(spec, "fp32"), spec.target("sm_90")).ptx.decode()
    for found in (disasm.facts(listing(spec)), disasm.facts(ptx=ptx)):
        assert disasm.lint(found) == []
        assert found.instructions == sum(found.counts.values()) > 20
        assert any(kind.startswith("STG.") for kind in found.counts)
        assert (found.hottest is None) == (not found.loops)


# --- differences ---------------------------------------------------------------------------------


def test_registers_labels_and_offsets_are_no_difference():
    old = sass("FFMA R1, R2.reuse, R3, UR4", "@P0 BRA `(.L_x_1)")
    new = sass("NOP", "FFMA R9, R8, R7, UR5", "@P1 BRA `(.L_x_22)").replace("NOP", "//")
    assert disasm.diff(old, new) == ""
    ptx = "\tadd.s32 \t%r1, %r2, 4; // sum\n\t@%p1 bra $L__BB0_2;\n"
    assert disasm.diff(ptx, "add.s32 %r7, %r3, 4;\n\n@%p9 bra $L__BB1_9;") == ""


def test_real_differences_are_shown():
    old = sass("FFMA R1, R2, R3, R4", "LDS.64 R2, [R4]", "EXIT")
    new = sass("FFMA R1, R2, R3, R4", "LDS.128 R2, [R4]", "EXIT")
    lines = disasm.diff(old, new).splitlines()
    assert [line for line in lines if re.match(r"[-+][^-+]", line)] == [
        "-LDS.64 R, [R] ;", "+LDS.128 R, [R] ;",
    ]  # fmt: skip
    assert disasm.diff("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.y;") != ""
    assert disasm.diff("add.s32 %r1, %r2, 4;", "add.s32 %r1, %r2, 8;") != ""


@pytest.mark.nvrtc
def test_line_information_is_no_difference():
    source = source_of(PORTABLE[0], "fp16")
    plain, traced = compiled(source, "sm_90"), compiled(source, "sm_90", lineinfo=True)
    assert disasm.diff(plain.ptx.decode(), traced.ptx.decode()) == ""
    other = compiled(source_of(PORTABLE[0], "fp32"), "sm_90")
    assert disasm.diff(plain.ptx.decode(), other.ptx.decode()) != ""


# --- annotated PTX assembles ---------------------------------------------------------------------


@pytest.mark.nvrtc
@pytest.mark.nvjitlink
def test_annotated_ptx_assembles_to_the_same_code():
    from assembling import assemble

    source = source_of(PORTABLE[0], "fp16", "sm_80")
    plain = compiled(source, "sm_80").ptx.decode()
    traced = compiled(source, "sm_80", lineinfo=True).ptx.decode()
    shown = disasm.annotate_ptx(traced, source.text)
    assert shown.count("\n// ") > 20
    assert disasm.same_code(*(assemble(ptx.encode(), "sm_80") for ptx in (shown, plain)))
