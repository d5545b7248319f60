# SPDX-License-Identifier: Apache-2.0
"""Config in, CUDA source out. The only place that knows Jinja."""

from __future__ import annotations

import functools
import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2

from tunegen.errors import TemplateError
from tunegen.model import Config, KernelDefinition, KernelSource, KernelSpec, Operation, Problem
from tunegen.resources import data_dir


class _Loader(jinja2.FileSystemLoader):
    """Puts a blank line before and after each fragment: a ``//%`` line swallows those in the
    template."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        source, path, current = super().get_source(environment, template)
        if template.startswith("lib/"):
            source = f"\n{source}\n"
        return source, path, current


@functools.cache
def environment(root: Path | None = None) -> jinja2.Environment:
    """The environment of every template: CUDA-safe delimiters, undefined names are errors.

    Statements are ``//%`` lines, values ``${name}``, remarks ``/*# #*/``: a template stays CUDA to
    every tool, and braces in CUDA never meet Jinja's. Templates under ``root`` come before the
    shipped ones, so that a kernel kept elsewhere still finds the fragments in ``lib``.
    """
    folders = [data_dir("templates")] if root is None else [root, data_dir("templates")]
    return jinja2.Environment(
        loader=_Loader(folders),
        line_statement_prefix="//%",
        block_start_string="/*%",
        block_end_string="%*/",
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="/*#",
        comment_end_string="#*/",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(
    spec: KernelSpec, config: Config, problem: Problem, arch: str
) -> tuple[KernelSource, ...]:
    """The source of every kernel that ``config`` needs; the same input gives the same bytes.

    Raises :class:`TemplateError` for a template that is missing or does not render.
    """
    command = regenerate(spec, config, problem, arch)
    return tuple(
        _render_one(spec, definition, config, arch, command)
        for definition in spec.kernels(config, problem)
    )


def render_definition(
    definition: KernelDefinition, target: str, template_root: Path | None = None
) -> KernelSource:
    """The source of a kernel that belongs to no search space, such as those that check results.

    Raises :class:`TemplateError` as :func:`render` does.
    """
    banner = f"// {definition.entry}, for {target}.\n// SPDX-License-Identifier: Apache-2.0\n"
    return _source(definition, banner, definition.constants, template_root)


def _render_one(
    spec: KernelSpec, definition: KernelDefinition, config: Config, arch: str, command: str
) -> KernelSource:
    banner = (
        f"// {definition.entry}: {spec.operation.summary}, spec {spec.name}, "
        f"for {spec.target(arch)}.\n"
        "// SPDX-License-Identifier: Apache-2.0\n"
        f"// Config: {config}\n"
        f"// Regenerate: {command}\n"
    )
    return _source(definition, banner, {**config, **definition.constants}, spec.template_root)


def _source(
    definition: KernelDefinition, banner: str, constants: Mapping[str, int], root: Path | None
) -> KernelSource:
    try:
        template = environment(root).get_template(definition.template)
        body = template.render(types=definition.types, constants=constants, **constants)
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"template {error.name} of {definition.name} is missing") from error
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"template {definition.template}: {error}") from error
    text = re.sub(r"\n{3,}", "\n\n", f"{banner}\n{body.strip()}\n")
    return KernelSource(definition.name, definition.entry, text, source_digest(body))


def regenerate(spec: KernelSpec, config: Config, problem: Problem, arch: str) -> str:
    """The command line that prints this very source again."""
    words = [*program_words(spec), "inspect", spec.operation.name]
    words += ["--arch", arch, "--spec", spec.name]
    words += problem_words(spec.operation, problem)
    for name, value in config.items():
        words += ["--param", f"{name}={value}"]
    return shlex.join([*words, "--emit", "cuda"])


def program_words(*specs: KernelSpec) -> list[str]:
    """What every command line about specs begins with: ``tunegen``, and their kernel files."""
    files = dict.fromkeys(spec.file for spec in specs if spec.file)
    return ["tunegen", *(word for file in files for word in ("--kernel", file))]


def problem_words(operation: Operation, problem: Problem) -> list[str]:
    """A problem as words of a command line; attributes at their default are left out."""
    words = ["--problem", operation.text(problem), "--dtype", problem.dtype]
    if problem.layout:
        words += ["--layout", problem.layout]
    for word in operation.special_words(problem):
        words += ["--attribute", word]
    return words


_COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\b\d[\w']*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


def strip_comments(text: str) -> str:
    """CUDA source without comments, blank lines and trailing spaces; literals are left alone."""

    def replace(match: re.Match[str]) -> str:
        return " " if match[0].startswith("/") else match[0]

    lines = (line.rstrip() for line in _COMMENT_OR_LITERAL.sub(replace, text).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def source_digest(text: str) -> str:
    """SHA-256 of the source without comments: what a kernel is, apart from what is said of it."""
    return hashlib.sha256(strip_comments(text).encode()).hexdigest()
