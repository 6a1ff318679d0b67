# SPDX-License-Identifier: Apache-2.0
"""Packaging: a plain setuptools project; SGLang finds the plugin by its entry points."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "sglang_dflash/__init__.py").read_text(), re.MULTILINE
).group(1)

# SGLang 0.5.23 brings gguf, and through FlashInfer tabulate: the demo runs without this extra too.
DEMO = ["gguf>=0.17", "pip>=25.1", "tabulate>=0.9"]
TEST = [
    *DEMO,
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "hypothesis>=6",
    "jsonschema>=4",
    "matplotlib>=3.9",
    "openai>=2",
    "ruff>=0.14",
]
BENCH = [*DEMO, "matplotlib>=3.9", "pyyaml>=6"]

setup(
    name="sglang-dflash",
    version=VERSION,
    description="DFlash speculative decoding for SGLang, as a plugin, on CPUs; not yet run on GPUs",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # outlines_core 0.1.26, which SGLang 0.5.23 comes down to, has no wheel for 3.13.
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["sglang_dflash", "sglang_dflash.*"]),
    package_data={"sglang_dflash": ["assets/*/*", "training/recipes/*.yaml"]},
    install_requires=["sglang==0.5.23"],
    extras_require={"demo": DEMO, "test": TEST, "bench": BENCH},
    entry_points={
        "sglang.srt.plugins": ["dflash = sglang_dflash.plugin:register"],
        "sglang.srt.platforms": ["dflash_cpu = sglang_dflash.plugin:cpu_platform"],
        "console_scripts": ["sglang-dflash = sglang_dflash.cli:main"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
