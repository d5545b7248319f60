# SPDX-License-Identifier: Apache-2.0
"""PTX and SASS in; facts, annotation and differences out. Needs neither GPU nor driver."""

from tunegen.disasm.annotate import annotate_ptx, annotate_sass
from tunegen.disasm.counts import Facts, Loop, facts, lint
from tunegen.disasm.difference import diff, normalize
from tunegen.disasm.elf import code_digest, code_sections, cubin_capability, same_code
from tunegen.disasm.tool import disassemble, find_nvdisasm

__all__ = [
    "Facts",
    "Loop",
    "annotate_ptx",
    "annotate_sass",
    "code_digest",
    "code_sections",
    "cubin_capability",
    "diff",
    "disassemble",
    "facts",
    "find_nvdisasm",
    "lint",
    "normalize",
    "same_code",
]
