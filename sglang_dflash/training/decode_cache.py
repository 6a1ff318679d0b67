# SPDX-License-Identifier: Apache-2.0
"""A cache with room for tokens to come: transformers' own copies all keys for each new token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["RoomyLayer", "decode_cache"]

_ROOM = 64  # tokens; all is copied once in so many steps


class RoomyLayer(DynamicLayer):
    """A layer's keys and values, views of the first positions of larger tensors.

    Attributes:
        keys: [n, num_kv_heads, S, D], as those of the base class.
        values: [n, num_kv_heads, S, D].

    Source: must equal `DynamicLayer` of transformers.
    """

    _rooms: tuple[torch.Tensor, torch.Tensor] | None = None  # what keys and values are views of

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens; return the keys and values of all.

        Args:
            key_states: [n, num_kv_heads, T, D], of T new tokens.
            value_states: [n, num_kv_heads, T, D].
            args: what the attention layer says beside, for other caches.
            kwargs: the same.
        """
        first, end = (length := self.get_seq_length()), length + key_states.shape[-2]
        if self._rooms is None or end > self._rooms[0].shape[-2]:
            grown = [_room(new, end + _ROOM) for new in (key_states, value_states)]
            if first:
                grown[0][..., :first, :] = self.keys
                grown[1][..., :first, :] = self.values
            self._rooms = (grown[0], grown[1])
            self.is_initialized = True
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., first:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the texts of some rows, [m] int64."""
        super().batch_select_indices(indices)
        self._rooms = None


def decode_cache() -> Cache:
    """Return an empty cache for texts decoded token by token, full attention in every layer."""
    return Cache(layer_class_to_replicate=RoomyLayer)


def _room(like: torch.Tensor, length: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:-2], length, like.shape[-1]))
