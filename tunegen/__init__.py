# SPDX-License-Identifier: Apache-2.0
"""tunegen: a code-generating CUDA kernel autotuner."""

__version__ = "0.1.0"
