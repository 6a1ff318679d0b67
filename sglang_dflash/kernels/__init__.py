# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, each beside a torch reference of the same signature.

They replace chains of small operators, each of which a GPU's host has to launch. What is not on a
GPU goes through the reference.
"""
