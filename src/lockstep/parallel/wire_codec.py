"""Encode flat fp32 buffers in the formats of network/wire_format.py, and decode them.

int8 rounds up or down at random, so that rounding has no bias. The random number is a hash of the
key, the element, its position in the block and the block's scale: there is no state, and the block
and the key decide all bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.network.wire_format import (
    FORMATS,
    SCALE_BYTES,
    Section,
    Sections,
    WireFormat,
    element_count,
    encoded_bytes,
)

CHUNK = 1 << 18  # elements that are encoded together: less memory than whole buffers, few calls
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
    for section, values, codes, scales in split(flat, encoded, sections):
        if scales is None:
            codes.copy_(values)
            continue
        keys = position_keys(key, section.block, flat.device)
        blocks = CHUNK // section.block
        scratch = torch.empty(2, blocks, section.block, dtype=torch.int32, device=flat.device)
        chunks = (tensor.split(blocks) for tensor in (values, codes, scales))
        for part, out, out_scales in zip(*chunks, strict=True):
            scale = encode_blocks(part, out, FORMATS[section.wire], keys, scratch)
            out_scales.copy_(scale.view(torch.uint8))
    return encoded


def decode(encoded: Tensor, sections: Sections) -> Tensor:
    """Return the elements, fp32 (elements,)."""
    flat = torch.empty(element_count(sections), device=encoded.device)
    for _, values, codes, scales in split(flat, encoded, sections):
        values.copy_(codes)
        if scales is not None:
            aligned = scales.clone(memory_format=torch.contiguous_format)
            values.mul_(aligned.view(torch.float32))
    return flat


def split(
    flat: Tensor, encoded: Tensor, sections: Sections
) -> Iterator[tuple[Section, Tensor, Tensor, Tensor | None]]:
    """Yield views of each section: its values, its codes, and the bytes of its scales; of blocks
    (blocks, elements)."""
    values = flat.split([section.elements for section in sections])
    rows = encoded.split([section.encoded_bytes for section in sections])
    for section, own, row in zip(sections, values, rows, strict=True):
        dtype = getattr(torch, FORMATS[section.wire].dtype)
        if section.block == 1:
            yield section, own, row.view(dtype), None
            continue
        blocks = own.view(-1, section.block)
        scales, codes = row.view(len(blocks), -1).tensor_split([SCALE_BYTES], 1)
        yield section, blocks, codes.view(dtype), scales


def encode_blocks(
    values: Tensor, codes: Tensor, wire: WireFormat, keys: Tensor, scratch: Tensor
) -> Tensor:
    """Write the codes of each block, (n, block); return their scales, fp32 (n, 1).

    keys     of the positions in a block: (block,) int32
    scratch  (2, at least n, block), int32; new memory would take longer than the arithmetic
    """
    noise, other = scratch[:, : len(values)]
    floats = other.view(torch.float32)
    largest = torch.abs(values, out=floats).amax(dim=1, keepdim=True)
    scales = largest.div_(wire.largest).clamp_min_(SMALLEST_SCALE)
    if not wire.is_random:
        codes.copy_(torch.div(values, scales, out=floats))
        return scales
    torch.mul(values.view(torch.int32), FACTORS[0], out=noise)
    noise.add_(scales.view(torch.int32) * FACTORS[1]).add_(keys)
    noise.bitwise_xor_(torch.bitwise_right_shift(noise, 15, out=other)).mul_(FACTORS[2])
    torch.div(values, scales, out=floats).add_(noise, alpha=NOISE)
    codes.copy_(floats.round_().clamp_(-wire.largest, wire.largest))
    return scales


def position_keys(key: int, block: int, device: torch.device) -> Tensor:
    """Return a number for each position in a block: (block,) int32."""
    mixed = (torch.arange(block, device=device) + (key >> 1)) * POSITION_FACTOR
    return ((mixed ^ mixed >> 31) * POSITION_FACTOR >> 32).to(torch.int32)
