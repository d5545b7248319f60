# SPDX-License-Identifier: Apache-2.0
"""The command line: click commands over tunegen.session. The only package that prints.

Results go to stdout, progress and notes to stderr. ``--json`` prints one document and nothing
else. Exit codes: 0 done, 1 failed, 2 usage, 3 a check failed, 130 interrupted.
"""

from tunegen.cli.main import cli, main

__all__ = ["cli", "main"]
