"""The front of a prefix: an attention sink, and generated keys turned to their places behind it.

LMs put much of their attention on the first tokens of a text, whatever these are (Xiao et al., 2024, "Efficient
Streaming Language Models with Attention Sinks"). A prefix that takes this place from them does harm; so the LM's own
keys and values of its first tokens stand in front of the generated ones. Rotary LMs turn each key by its position, so a
map from memory tokens gives keys before rotation, which say nothing of where they will stand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeyRotation(nn.Module):
    """Turns the keys of all layers to N positions, and back (rotary position embedding; Su et al., 2021).

    Component i of a key becomes `cos_i key_i + sin_i key_partner(i)`. Pairs of halves and of neighbours, rotations of a
    part of the width, scales, and layers without positions are all of this form: what stays as it is has a cosine of 1
    and a sine of 0.

    Examples:
        >>> quarter_turn = KeyRotation(torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]]), torch.tensor([[1, 0]]))
        >>> quarter_turn(torch.tensor([[[[3.0, 4.0]]]]))  # one layer, one head, one position
        tensor([[[[-4.,  3.]]]])

    Args:
        cos, sin: `[layers, N, head_width]`; the sine with its sign.
        partner: `[layers, head_width]`, for each component the other one of its pair.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __init__(self, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
        super().__init__()
        for name, buffer in (("cos", cos), ("sin", sin), ("partner", partner)):
            self.register_buffer(name, buffer, persistent=False)  # the LM's, and so in no checkpoint of ours

    def forward(self, keys: Tensor) -> Tensor:
        """Keys before rotation to keys at the first L of the N positions, `[..., layers, heads, L, head_width]`."""
        cos, sin = self._at(keys)
        return keys * cos + self._partners(keys) * sin

    def inverse(self, keys: Tensor) -> Tensor:
        """Keys at the first L of the N positions to keys before rotation, of the same shape."""
        cos, sin = self._at(keys)
        return (keys * cos - self._partners(keys) * sin) / (cos.square() + sin.square())

    def _at(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        length = keys.shape[-2]
        return self.cos[:, None, :length], self.sin[:, None, :length]

    def _partners(self, keys: Tensor) -> Tensor:
        return keys.gather(-1, self.partner[:, None, None].expand_as(keys))


class AttentionSink(nn.Module):
    """Puts an LM's own keys and values of its first tokens in front of generated ones.

    Args:
        keys_values: `[layers, 2, kv_heads, S, head_width]`, of the LM's first S tokens.
        rotation: turns keys to the P positions behind the sink, from S on.
    """

    keys_values: Tensor

    def __init__(self, keys_values: Tensor, rotation: KeyRotation) -> None:
        super().__init__()
        self.register_buffer("keys_values", keys_values, persistent=False)
        self.rotation = rotation

    @property
    def length(self) -> int:
        """S."""
        return self.keys_values.shape[3]

    def forward(self, generated: Tensor) -> Tensor:
        """Keys before rotation, and values, to a whole prefix.

        Args:
            generated: `[B, layers, 2, kv_heads, P, head_width]`.

        Returns:
            `[B, layers, 2, kv_heads, S + P, head_width]`.
        """
        keys, values = generated.unbind(2)
        keys = self.rotation(keys)
        behind = torch.stack([keys, values.to(keys.dtype)], 2)
        sink = self.keys_values.to(behind.dtype).expand(len(behind), *self.keys_values.shape)
        return torch.cat([sink, behind], 4)
