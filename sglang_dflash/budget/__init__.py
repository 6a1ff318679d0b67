# SPDX-License-Identifier: Apache-2.0
"""The verify budget: how many rows of each request are worth verifying at the present load."""
