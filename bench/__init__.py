# SPDX-License-Identifier: Apache-2.0
"""Concurrency sweeps over real servers: `python -m bench sweep CONFIG.yaml` from a checkout."""
