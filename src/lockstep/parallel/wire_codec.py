"""Encode flat fp32 buffers in the formats of network/wire_format.py, and decode them.

int8 rounds up or down at random, so that rounding has no bias. The random number is a hash of the
key, the element, its position in the block and the block's scale: there is no state, and the block
and the key decide all bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.network.wire_format import (
    SCALE_BYTES,
    Section,
    Sections,
    element_count,
    encoded_bytes,
)

CHUNK = 1 << 18  # elements that are encoded together: less memory than whole buffers, few calls
LARGEST = 127
NOISE = 2.0**-32  # of an int32, in units of a code: up to half a unit, up or down
SMALLEST_SCALE = 2.0**-126  # of a block of zeros: no division by zero, nor by a denormal number
FACTORS = -1640531535, -2048144777, 2146121005  # odd, as int32: 0x9E3779B1, 0x85EBCA77, 0x7FEB352D
POSITION_FACTOR = 0x1CE4E5B9BF58476D


def encode(flat: Tensor, sections: Sections, key: int) -> Tensor:
    """Return the encoded elements, uint8 (bytes,). A block with an infinity or NaN decodes to NaN
    or infinities.

    flat  (elements,), fp32
    key   decides how int8 rounds; 64 bits
    """
    encoded = torch.empty(encoded_bytes(sections), dtype=torch.uint8, device=flat.device)
    for section, values, rows in split(flat, encoded, sections):
        if section.block == 1:
            rows.view(torch.bfloat16).copy_(values)
        else:
            keys, blocks = position_keys(key, section.block, flat.device), CHUNK // section.block
            scratch = torch.empty(2, blocks, section.block, dtype=torch.int32, device=flat.device)
            chunks = rows.view(-1, SCALE_BYTES + section.block).split(blocks)
            for chunk, out in zip(
                values.view(-1, section.block).split(blocks), chunks, strict=True
            ):
                encode_blocks(chunk, out, keys, scratch)
    return encoded


def decode(encoded: Tensor, sections: Sections) -> Tensor:
    """Return the elements, fp32 (elements,)."""
    flat = torch.empty(element_count(sections), device=encoded.device)
    for section, values, rows in split(flat, encoded, sections):
        if section.block == 1:
            values.copy_(rows.view(torch.bfloat16))
        else:
            blocks = rows.view(-1, section.block + SCALE_BYTES)
            scales = (
                blocks[:, :SCALE_BYTES]
                .clone(memory_format=torch.contiguous_format)
                .view(torch.float32)
            )
            values.view(-1, section.block).copy_(blocks[:, SCALE_BYTES:].view(torch.int8)).mul_(
                scales
            )
    return flat


def split(
    flat: Tensor, encoded: Tensor, sections: Sections
) -> list[tuple[Section, Tensor, Tensor]]:
    values = flat.split([section.elements for section in sections])
    return list(
        zip(
            sections,
            values,
            encoded.split([section.encoded_bytes for section in sections]),
            strict=True,
        )
    )


def encode_blocks(values: Tensor, out: Tensor, keys: Tensor, scratch: Tensor) -> None:
    """Write the scale and the codes of each block: (n, block) fp32 to (n, 4 + block) uint8.

    keys     of the positions in a block: (block,) int32
    scratch  (2, at least n, block), int32; new memory would take longer than the arithmetic
    """
    noise, other = scratch[:, : len(values)]
    floats = other.view(torch.float32)
    scales = (
        torch.abs(values, out=floats)
        .amax(dim=1, keepdim=True)
        .div_(LARGEST)
        .clamp_min_(SMALLEST_SCALE)
    )
    torch.mul(values.view(torch.int32), FACTORS[0], out=noise).add_(
        scales.view(torch.int32) * FACTORS[1]
    ).add_(keys)
    noise.bitwise_xor_(torch.bitwise_right_shift(noise, 15, out=other)).mul_(FACTORS[2])
    codes = (
        torch.div(values, scales, out=floats)
        .add_(noise, alpha=NOISE)
        .round_()
        .clamp_(-LARGEST, LARGEST)
    )
    out[:, :SCALE_BYTES] = scales.view(torch.uint8)
    out[:, SCALE_BYTES:].view(torch.int8).copy_(codes)


def position_keys(key: int, block: int, device: torch.device) -> Tensor:
    """Return a number for each position in a block: (block,) int32."""
    mixed = (torch.arange(block, device=device) + (key >> 1)) * POSITION_FACTOR
    return ((mixed ^ mixed >> 31) * POSITION_FACTOR >> 32).to(torch.int32)
