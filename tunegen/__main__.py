# SPDX-License-Identifier: Apache-2.0
"""``python -m tunegen``: the command line."""

from tunegen.cli import main

main()
