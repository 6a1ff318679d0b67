# SPDX-License-Identifier: Apache-2.0
"""What the environment asks of the plugin, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Options"]

WorkerChoice = Literal["plugin", "upstream"]


@dataclass(frozen=True)
class Options:
    """The plugin's settings beside SGLang's own flags.

    Attributes:
        worker: `SGLANG_DFLASH_WORKER`. Who serves DFLASH: this plugin's worker, or SGLang's own.
    """

    worker: WorkerChoice = "plugin"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Options:
        """Read the options from environment variables.

        Raises:
            ValueError: a variable has a value that is not one of its choices.
        """
        worker = environ.get("SGLANG_DFLASH_WORKER", "plugin").strip().lower()
        choices = get_args(WorkerChoice)
        if worker not in choices:
            raise ValueError(
                f"SGLANG_DFLASH_WORKER={worker!r} is not one of {', '.join(choices)}: "
                "'plugin' (the default) serves DFLASH with sglang-dflash, 'upstream' with SGLang's "
                "own worker. Unset it or choose one."
            )
        return cls(worker=worker)
