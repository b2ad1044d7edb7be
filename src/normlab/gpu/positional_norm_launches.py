"""Sizes and launches of positional norm: one launch a direction, and one more for the gradients of its affine map."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from ..statistics.affine import SecondMap
from .kernels import positional_norm as positional_norm_kernels
from .launch import Launch
from .launch_plans import BACKWARD_MASK, FORWARD_MASK, LaunchPlan, LaunchPlans
from .shapes import Shape
from .tiles import ceil, power, processors_of

# The tensors and numbers of a call that the kernels take. They have one affine map: it stands where the shared one does
# or, where each sample has its own (True), where the second one does.
_FORWARD = {False: ((0, 1, 2, 5, 6), (1, 7)), True: ((0, 1, 2, 7, 8), (1, 7))}
_BACKWARD = {False: ((*range(5), 8, 9, 6), (0, 1)), True: ((*range(5), 10, 11, 6), (0, 1))}
_JOIN = {False: ((6, 16, 17), ()), True: ((6, 18, 19), ())}

_WAVES = 8  # programs a multiprocessor in backward, each with sums of its own
# Channels, and sums of programs, that are joined at once. Few channels, so that several programs join.
_COLUMNS, _SHARES = 8, 256


class Tile(NamedTuple):
    """What a program takes at once, and how."""

    positions: int
    channels: int
    warps: int
    stages: int = 1  # of backward: blocks in flight, one being computed and the rest read ahead


# By whether channels lie last: the most channels that a program takes whole, and its tile where there are more.
_WHOLE = {True: 4096, False: 2048}
_PART = {True: Tile(2, 2048, 4), False: Tile(32, 128, 8)}


class PositionalNormConfig(NamedTuple):
    """What the kernels of positional norm are compiled for and sized by."""

    shape: Shape
    shared: bool  # one affine map for all samples
    second: SecondMap  # NONE or PER_SAMPLE
    act: int
    residual: bool
    centered: bool  # whether the mean is taken off
    masked: bool = False


class PositionalNormPlan(LaunchPlan):
    """Only ``x`` is kept for backward. Where only dx is wanted, nothing else is computed."""

    def __init__(self, config: PositionalNormConfig) -> None:
        self.config, self.shape = config, config.shape
        shape = config.shape
        (n, c, s), last = shape[:3], shape.channels_last
        self.has_inner = config.residual and (config.act > 0 or config.masked)
        ahead, after = (FORWARD_MASK, BACKWARD_MASK) if config.masked else (None, None)
        per_sample = config.second == SecondMap.PER_SAMPLE
        affine = config.shared or per_sample
        if (last or s == 1) and not per_sample:  # positions of all samples lie one after the other
            n, s, last = 1, n * s, True
        device, far, unit = shape.device, c * s >= 1 << 31, gcd(c if last else s, 16)
        in_parts = c > _WHOLE[last]

        def tile_and_constants(backward: bool) -> tuple[Tile, tuple[Any, ...]]:
            tile = _PART[last] if in_parts else _tile(config, c, s, last, unit, backward)
            stages = (tile.stages,) if backward and not in_parts else ()
            options = (config.centered, affine, per_sample, config.act, config.residual)
            return tile, (last, far, unit, tile.positions, tile.channels, *stages, *options)

        kernels = positional_norm_kernels
        tile, fixed = tile_and_constants(False)
        blocks = ceil(s, tile.positions)
        kernel = kernels.forward_in_parts if in_parts else kernels.forward
        takes = _FORWARD[per_sample]
        self.forward = [Launch(kernel, n * blocks, (c, s, blocks, *fixed), device, False, takes, tile.warps, ahead)]
        tile, fixed = tile_and_constants(True)
        blocks = ceil(s, tile.positions)
        blocks_a_program = ceil(blocks, min(blocks, ceil(_WAVES * processors_of(device), n)))
        programs = ceil(blocks, blocks_a_program)  # of a sample
        self.backward_floats = n * programs * 2 * c

        def backward(of_parameters: bool, of_x: bool) -> list[Launch]:
            arguments = (c, s, blocks_a_program, programs, *fixed, of_parameters, of_x)
            kernel = kernels.backward_in_parts if in_parts else kernels.backward
            takes = _BACKWARD[per_sample]
            launches = [Launch(kernel, n * programs, arguments, device, False, takes, tile.warps, after)]
            if of_parameters:
                samples, shares = (n, programs) if per_sample else (1, n * programs)
                grid, sizes = samples * ceil(c, _COLUMNS), (c, shares, _SHARES, _COLUMNS)
                launches.append(Launch(kernels.join, grid, sizes, device, False, _JOIN[per_sample]))
            return launches

        self.backward, self.backward_of_x = backward(affine, True), backward(False, True)
        self.backward_of_parameters = backward(affine, False)


def _tile(config: PositionalNormConfig, c: int, s: int, last: bool, unit: int, backward: bool) -> Tile:
    """The tile of a program that takes all channels. Contiguous, positions lie together, so it takes many of them.

    Where backward reads 16 bytes at once, it reads ahead, as far as there is shared memory.
    """
    channels = power(c)
    few, many = (2048, 4096) if last else (4096, 8192)
    elements = few if (backward if last else channels <= 128) else many
    positions = min(power(s), max(1, elements // channels))
    # Wide reads need fewer registers for addresses, and so fewer threads.
    warps = 4 if not backward and unit >= 4 else max(4, positions * channels // 1024)
    tile = Tile(positions, channels, warps)
    size = config.shape.dtype.itemsize
    if not backward or unit * size < 16:
        return tile
    read = positions * channels * size * (3 if config.act and config.residual else 2)
    return tile._replace(stages=min(3, 1 + _shared_memory(config.shape.device) // read))


@lru_cache(maxsize=64)
def _shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may have besides what its sums need."""
    if device < 0:
        return 0
    has = torch.cuda.get_device_properties(device)
    return getattr(has, "shared_memory_per_block_optin", 49152) - 16384


@lru_cache(maxsize=4096)
def plans_for(config: PositionalNormConfig) -> LaunchPlans:
    return LaunchPlans(config, PositionalNormPlan)
