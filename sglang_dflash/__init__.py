# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding for SGLang, as a plugin.

Importing this package loads neither torch nor sglang.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
