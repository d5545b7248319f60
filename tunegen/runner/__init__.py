# SPDX-License-Identifier: Apache-2.0
"""Cubins in, outcomes out. One worker process does all the launching, and dies alone."""
