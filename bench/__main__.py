# SPDX-License-Identifier: Apache-2.0
"""`python -m bench`."""

from __future__ import annotations

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
