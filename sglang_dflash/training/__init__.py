# SPDX-License-Identifier: Apache-2.0
"""How a draft is made: texts of the target, the loss over random blocks, and the loop."""
