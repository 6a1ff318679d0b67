# SPDX-License-Identifier: Apache-2.0
"""Makes the kernels for Triton's interpreter where there is no GPU.

Triton's own functions are made when it is imported, so this comes before anything that does; the
variable is taken away again, for engines would inherit it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import sglang_dflash.kernels.confirm
    import sglang_dflash.kernels.context_keys
    import sglang_dflash.kernels.fill_block  # noqa: F401

    del os.environ["TRITON_INTERPRET"]
