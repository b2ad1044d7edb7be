"""The picture of a normalizer: which values of ``[N, C, *S]`` share their statistics, and the affine map that follows.

The numbers behind the colours come from the plans that the layer itself computes with. The SVG is plain text, with
colours that can be read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, gcd, lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from ..engine.messages import check_number, words
from ..layers.norm import Norm
from ..layers.running_state import plans_of
from ..statistics.mixture import Mixture
from ..statistics.modes import Modes
from ..statistics.plans import Plan
from ..statistics.pools import Pool


@dataclass(frozen=True)
class Block:
    """One block of values of a picture."""

    name: str
    numbers: Tensor  # [n, c, *S]: values of one number share their statistics
    about: str  # a sentence: what the pool is
    share: Tensor | None = None  # [n], how far each sample belongs; None: wholly
    notes: tuple[str, ...] = ()  # more lines under the block
    faded: bool = False  # a pool without weight


@dataclass(frozen=True)
class Drawing:
    """A picture. Notebooks show it; ``save`` writes it; ``text`` says in words what it shows."""

    svg: str
    text: str
    blocks: tuple[Block, ...]
    samples: tuple[int, ...]  # those of the batch that are drawn
    channels: tuple[int, ...]  # those of the layer that are drawn

    def save(self, path: str | Path) -> Path:
        """Write the SVG to ``path``."""
        path = Path(path)
        path.write_text(self.svg, encoding="utf-8")
        return path

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Drawing({self.text!r})"


def draw(
    layer: Norm,
    *,
    samples: int | None = None,
    channels: int | None = None,
    size: Sequence[int] | None = None,
    labels: bool = True,
) -> Drawing:
    """Draw which values share their statistics in ``layer``, and the affine map that follows.

    Values of one colour, inside one thick line, share one mean and one variance. Wide layers and large ghost batches
    are drawn by a few of their channels and samples.

    Args:
        layer: any layer of normlab, also one with a :class:`normlab.Statistics` of your own.
        samples: how many samples the batch has; all are drawn.
        channels: how many of the layer's channels are drawn.
        size: the spatial size of the input, such as ``(4, 4)``.
        labels: whether the picture has words in it.

    >>> import normlab
    >>> picture = draw(normlab.GroupNorm2d(8, 64))
    >>> picture.channels
    (0, 1, 8, 9, 16, 17)
    >>> picture.text
    'GroupNorm2d: 3 samples, 6 of 64 channels, 6 positions. The values of each of 8 groups of channels of each sample \
share one mean and one variance. An affine map follows: one for all samples.'
    """
    _check(layer, samples, channels, size)
    pools, c = layer.statistics.pools, layer.num_features
    size = _default_size(pools, c, layer.dims) if size is None else tuple(size)
    ghost = max((p.ghost or 0 for p in pools), default=0)
    branches = len(layer.branches or ()) if any(p.over_batch for p in pools) else 0
    parts = max(branches, 1) * (2 if ghost else 1)  # of the batch, which share nothing
    batch = samples or max(3, parts * (ghost or 2))
    few = batch if samples else min(2 * parts, 12)
    _check_number_of_squares(min(batch, max(few, 6)), channels or min(c, 8), prod(size))
    found, seen = _numbers(layer, batch, few, size)
    starts, ends = ([t[0, :, at] for t in found.values()] for at in (0, -1))
    shown = _representatives(starts, ends, channels or 6, channels or 8)
    numbers = {name: t[:, shown].reshape(len(seen), -1, *size) for name, t in found.items()}
    blocks = _blocks(layer, numbers, tuple(dict.fromkeys(_branch_of(layer, i, batch) for i in seen)))
    text = _text(layer, blocks, len(seen), batch, len(shown), size)
    svg = _Sheet(layer, blocks, seen, shown, size, labels).svg(text)
    return Drawing(svg, text, blocks, tuple(seen), tuple(shown))


# --- what is drawn ------------------------------------------------------------------------------------------------


def _check(layer: object, samples: object, channels: object, size: object) -> None:
    if not isinstance(layer, Norm):
        got = f"{layer.__name__} itself: call it first" if isinstance(layer, type) else type(layer).__name__
        inside = ""
        if isinstance(layer, torch.nn.Module):
            name = next((n for n, m in layer.named_modules() if isinstance(m, Norm)), None)
            hint = "normlab.convert(model, ...) makes such layers of torch's"
            inside = f"; {hint if name is None else f'draw its layer model.get_submodule({name!r})'}"
        raise TypeError(f"draw() takes a layer of normlab, such as BatchNorm2d(64); got {got}{inside}")
    if samples is not None:
        check_number(samples, "samples")
    if channels is not None:
        check_number(channels, "channels")
        assert isinstance(channels, int)
        if channels > layer.num_features:
            raise ValueError(f"channels is {channels}, and the layer has {layer.num_features}; give at most that many")
    if size is None:
        return
    if not isinstance(size, Sequence) or isinstance(size, str):
        raise TypeError(f"size is the spatial size of the input, such as (4, 4); got {size!r}")
    for s in size:
        check_number(s, "each number in size")
    least = 0 if layer.dims in (None, 1) else layer.dims
    if layer.dims is not None and not least <= len(size) <= layer.dims:
        raise ValueError(f"size has {len(size)} axes; {type(layer).__name__} takes {layer.dims}")


def _check_number_of_squares(samples: int, channels: int, positions: int) -> None:
    if samples * channels + channels * positions + samples * positions > 4096:
        raise ValueError(
            f"a block of {samples} samples, {channels} channels and {positions} positions has too many values to "
            "draw; give smaller samples=..., channels=... and size=..."
        )


def _default_size(pools: Sequence[Pool], channels: int, dims: int | None) -> tuple[int, ...]:
    """Few positions; so many that runs fit, and divide them where they would at a usual resolution."""
    groups = [p.groups or 1 for p in pools if p.kind == "run"]
    step = lcm(*(g // gcd(g, channels) for g in groups))
    whole = next((s for s in (6, 8, 16) if s % step == 0), max(6, ceil(max(groups, default=1) / channels)))
    if dims == 1:
        return (whole,)
    plane = (2, ceil(whole / 2))
    return (1, *plane) if dims == 3 else plane


def _numbers(layer: Norm, batch: int, few: int, size: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
    """By the name of each pool the number of every value's statistic, ``[n, C, S]``, and which n samples these are.

    Every statistic gets a number, and the layer's own plans take the numbers to the values.
    """
    statistics, c, spatial = layer.statistics, layer.num_features, prod(size)
    described = statistics.picture((batch, c, *size))
    if described:
        checked = {n: _checked(layer, n, t, (batch, c, *size)) for n, t in described.items()}
        of_samples = [t[:, 0, 0] for t in checked.values()]
        seen = _representatives(of_samples, of_samples, few, max(few, 6))
        return {n: t[seen] for n, t in checked.items()}, seen
    if not statistics.pools:
        name = type(statistics).__name__
        raise TypeError(f"{name} has no pools to draw; give it a picture(shape) method, as normlab.Statistics has it")
    branch = 0
    if layer.branches is not None:
        branch = torch.tensor([_branch_of(layer, i, batch) for i in range(batch)], device="cpu")
    x = torch.empty(batch, c, *size, device="cpu")
    rows, _, plans = plans_of(layer, x, spatial, branch, True)
    of_rows = [_at_rows(plan, batch) for plan in plans]
    of_samples = [t[:, 0] for t in of_rows]
    seen = _representatives(of_samples, of_samples, few, max(few, 6))
    length = torch.as_tensor(rows.size(spatial, x.device))
    values = [t[seen].repeat_interleave(length, 1).reshape(len(seen), c, spatial) for t in of_rows]
    return {str(plan.pool): t for plan, t in zip(plans, values, strict=True)}, seen


def _branch_of(layer: Norm, sample: int, batch: int) -> int:
    """The branches share the batch, in order."""
    return sample * len(layer.branches or ()) // batch


def _at_rows(plan: Plan, batch: int) -> Tensor:  # [N, R]
    segments = plan.segments.number if plan.pool.over_batch else batch
    numbers = torch.arange(segments * plan.groups, device="cpu").reshape(segments, plan.groups)
    return plan.expand(numbers).expand(batch, plan.rows.number)


def _checked(layer: Norm, name: str, numbers: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(numbers, Tensor) or numbers.is_floating_point() or tuple(numbers.shape) != shape:
        got = list(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        kind = f" of {numbers.dtype}" if isinstance(numbers, Tensor) else ""
        raise TypeError(
            f"{type(layer.statistics).__name__}.picture gives integers of shape {list(shape)} for {name!r}; "
            f"got {got}{kind}"
        )
    return numbers.reshape(*shape[:2], -1)


def _representatives(first: Sequence[Tensor], last: Sequence[Tensor], few: int, most: int) -> list[int]:
    """Which places of an axis to draw: several of each of the first few runs that share a statistic.

    ``first`` and ``last`` have, for each pool, the number at the first and the last value of each place.
    """
    number = len(first[0])
    if number <= most:
        return list(range(number))
    for a, b in zip(first, last, strict=True):
        ends = [*((a[1:] != b[:-1]).nonzero().flatten() + 1).tolist(), number]
        if 1 < len(ends) < number:
            break
    else:
        return list(range(few))
    each = max(2, few // min(len(ends), 3))
    found = [
        i
        for start, end in zip((0, *ends[:-1]), ends, strict=True)
        for i in range(start, end if end - start <= 3 else start + each)
    ]
    return found[:few]


def _blocks(layer: Norm, numbers: Mapping[str, Tensor], branches: Sequence[int]) -> tuple[Block, ...]:
    statistics, separated = layer.statistics, bool(layer.branches)
    pools = {str(p): p for p in statistics.pools}
    about = {n: _about(pools[n], separated) if n in pools else _described(n, t) for n, t in numbers.items()}
    names = (f"front to back: {', '.join(layer.branches[b] for b in branches)}",) if layer.branches else ()
    notes = {n: names if n in pools and pools[n].over_batch else () for n in numbers}
    if isinstance(statistics, Modes):
        ((name, t),) = numbers.items()
        gates = " A gate gives each sample a share in each mode; the opacities are an example of such shares."
        opacity = ("opacity: share of a sample", *notes[name])
        return tuple(
            Block(f"mode {k + 1}", t, f"Mode {k + 1}: {about[name]}{'' if k else gates}", share, opacity)
            for k, share in enumerate(_example_gates(len(t), statistics.number))
        )
    if isinstance(statistics, Mixture):
        blocks = []
        for name, (mean, var) in statistics.importance(layer._learned_values()).items():
            says = f"{about[name]} Its weight is {mean:.2f} in the mean and {var:.2f} in the variance."
            weights = f"{mean:.2f} of mean, {var:.2f} of var"
            faded = max(mean, var) < 0.005
            blocks.append(Block(name, numbers[name], says, None, (weights, *notes[name]), faded))
        return tuple(blocks)
    return tuple(Block(name, t, about[name], None, notes[name]) for name, t in numbers.items())


def _described(name: str, numbers: Tensor) -> str:
    """What statistics that are not made of pools share, by the axes along which nothing changes."""
    axes = ("samples", "channels", *["positions"] * (numbers.dim() > 2))
    t = numbers.flatten(2) if numbers.dim() > 2 else numbers
    along = [f"all {a}" for i, a in enumerate(axes) if bool((t == t.narrow(i, 0, 1)).all())]
    return f"{name.capitalize()}: statistics are shared by {words(along) if along else 'values of one colour'}."


def _about(pool: Pool, separated: bool) -> str:
    groups = pool.groups or 1
    if pool.kind == "channel":
        what = "each channel"
    elif groups == 1:
        what = "all channels"
    elif pool.kind == "run":
        what = f"each of {groups} runs of the merged channel and space axis"
    else:
        what = f"each of {groups} groups of channels"
    if not pool.over_batch:
        whose = "of each sample"
    elif pool.ghost is not None:
        whose = f"of every {pool.ghost} samples{' of a branch' if separated else ''}"
    else:
        whose = "of all samples of a branch" if separated else "of the whole batch"
    return f"The values of {what} {whose} share one mean and one variance."


def _example_gates(samples: int, modes: int) -> Tensor:  # [K, n]
    """Shares that differ from sample to sample, as a trained gate might give them."""
    place, mode = (torch.linspace(0, 1, k, device="cpu") for k in (samples, modes))
    return torch.softmax(-1.2 * (mode.unsqueeze(1) - place).square(), 0)


def _text(layer: Norm, blocks: Sequence[Block], n: int, batch: int, c: int, size: Sequence[int]) -> str:
    def counted(drawn: int, all_of_them: int, what: str) -> str:
        of = f" of {all_of_them}" if drawn < all_of_them else ""
        return f"{drawn}{of} {what}{'' if all_of_them == 1 else 's'}"

    places = f", {counted(prod(size), prod(size), 'position')}" if size else ""
    start = f"{type(layer).__name__}{f' ({header})' if (header := _header(layer, blocks)) else ''}"
    block = f"{counted(n, batch, 'sample')}, {counted(c, layer.num_features, 'channel')}{places}"
    maps = {
        "shared": "one for all samples",
        "class": f"one for each of {layer.num_classes} classes",
        "branch": f"one for each branch ({words(layer.branches or ())})",
        "style": "the deviation and mean of a style",
        "predicted": "what the sample's own moments predict",
    }
    after = ""
    for term in layer.affine_terms:
        after += f"{', plus ' if term == 'predicted' else ', then ' if after else ''}{maps[term]}"
    after = f"An affine map follows: {after}." if after else "No affine map follows."
    return f"{start}: {block}. {' '.join(b.about for b in blocks)} {after}"


def _header(layer: Norm, blocks: Sequence[Block]) -> str:
    """What the names of the blocks do not say."""
    label = layer.statistics.label
    return "" if label == "+".join(b.name for b in blocks) else label


# --- the sheet ----------------------------------------------------------------------------------------------------

Point = tuple[float, float]

_HUES = ("#4c8fd6", "#e58a2f", "#4aa86b", "#c75d9c", "#d9bf3a", "#7a6fd0", "#45b5b8", "#d4584e")
_INK = "#747a82"  # of words: four to one against white and against black
_LINE = "#15181c"  # between statistics, always on a colour
_FAINT = 'stroke="#000" stroke-opacity=".25" stroke-width=".5"'  # between values that share a statistic
_SHADES = (0.0, 0.32, -0.3, 0.55)  # towards white, or towards black
_SQUARE = 16.0  # the edge of a value, at most
_FONT = 11
_GAP = 0.5  # in squares, where places of an axis are left out


class _Sheet:
    """Blocks side by side, and the affine map after them."""

    def __init__(
        self,
        layer: Norm,
        blocks: Sequence[Block],
        samples: Sequence[int],
        channels: Sequence[int],
        size: Sequence[int],
        labels: bool,
    ) -> None:
        self.layer, self.blocks, self.labels = layer, blocks, labels
        self.samples, self.channels = samples, channels
        self.axes = ("", "L", "H &#215; W", "T &#215; H &#215; W")[len(size)] if len(size) < 4 else "positions"
        self.at_sample, self.at_channel = _places(samples), _places(channels)
        deep, wide, tall = self.at_sample[-1] + 1, self.at_channel[-1] + 1, prod(size)
        edge, self.rise = min(_SQUARE, 220 / (deep + wide)), min(_SQUARE, 200 / tall)
        self.across, self.down = 0.866 * edge, 0.5 * edge
        self.width, self.height = (deep + wide) * self.across, (deep + wide) * self.down + tall * self.rise
        self.deep, self.wide, self.tall = deep, wide, tall

    def svg(self, text: str) -> str:
        header = _header(self.layer, self.blocks) if self.labels else ""
        top = 6.0 + (_FONT + 6 if header else 0)
        left, parts = 6.0 + (_FONT + 6 if self.labels and self.axes else 0), []
        lowest, middle = top + self.height, top + self.height / 2
        joint = "+" if isinstance(self.layer.statistics, (Mixture, Modes)) else "and"
        for k, block in enumerate(self.blocks):
            if k:
                between = 26 if joint == "+" else 36
                parts.append(_label(left + between / 2, middle + 6, joint, size=18 if joint == "+" else _FONT))
                left += between
            lines = (block.name, *block.notes) if self.labels else ()
            wide = max(self.width, *(_length(line) for line in lines)) if lines else self.width
            parts.append(self._block(block, left + (wide - self.width) / 2, top, first=k == 0))
            for i, line in enumerate(lines):
                y = top + self.height + _FONT * (2.4 + 1.3 * i)
                parts.append(_label(left + wide / 2, y, escape(line), bold=i == 0))
                lowest = max(lowest, y)
            left += wide
        if header:
            parts.append(_label(max(left / 2, _length(header) / 2 + 6), 6 + _FONT, escape(header), bold=True))
            left = max(left, _length(header) + 6)
        for term in self.layer.affine_terms:
            part, left, low = self._term(term, left + 8, middle)
            parts.append(part)
            lowest = max(lowest, low)
        width, height = ceil(left + 6), ceil(lowest + 6)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" font-family="system-ui,sans-serif" '
            f'font-size="{_FONT}" fill="{_INK}" stroke-linejoin="round" stroke-linecap="round">\n'
            f"<title>{escape(type(self.layer).__name__)}</title>\n<desc>{escape(text)}</desc>\n"
            + "\n".join(parts)
            + "\n</svg>\n"
        )

    def _point(self, channel: float, sample: float, position: float) -> Point:
        """Channels go right and down, samples right and up, positions down."""
        up = self.deep * self.down
        return ((channel + sample) * self.across, up + (channel - sample) * self.down + position * self.rise)

    def _block(self, block: Block, left: float, top: float, first: bool) -> str:
        numbers = block.numbers.flatten(2) if block.numbers.dim() > 2 else block.numbers.unsqueeze(2)
        colours = _colours(numbers)
        share = [1.0] * len(numbers) if block.share is None else block.share.tolist()
        parts = []
        # From the back to the front: the later samples are farther, the later channels nearer.
        for samples in reversed(_runs(self.samples)):
            slabs = (self._slab(numbers, samples, c, colours, share) for c in _runs(self.channels))
            parts.extend(slabs)
        if self.labels:
            parts.append(self._axes(first))
        faded = ' opacity=".3"' if block.faded else ""
        return f'<g transform="translate({_n(left)} {_n(top)})"{faded}>\n' + "\n".join(parts) + "\n</g>"

    def _slab(
        self, numbers: Tensor, samples: range, channels: range, colours: Mapping[int, str], share: list[float]
    ) -> str:
        """A part of the block without gaps: its front, side and top."""
        c, n, p = (self.across, self.down), (self.across, -self.down), (0.0, self.rise)
        end = self.at_channel[channels[-1]] + 1
        near = self.at_sample[samples[0]]
        own, mine = slice(samples[0], samples[-1] + 1), slice(channels[0], channels[-1] + 1)
        origin = self.at_channel[channels[0]]
        depth = [share[i] for i in samples]
        faces = (
            # the grid, where it starts, the steps along its rows and columns, the share of each row
            (numbers[samples[0], mine], self._point(origin, near, 0), c, p, [share[samples[0]]] * len(channels)),
            (numbers[own, channels[-1]], self._point(end, near, 0), n, p, depth),
            (numbers[own, mine, 0], self._point(origin, near, 0), n, c, depth),
        )  # fmt: skip
        squares: dict[tuple[int, float], list[str]] = {}
        lines: list[str] = []
        shades: list[str] = []
        for (grid, start, row, column, shares), (shade, opacity) in zip(
            faces, (("", 0), ("#000", 0.2), ("#fff", 0.22)), strict=True
        ):
            values: list[list[int]] = grid.tolist()
            for i, each in enumerate(values):
                for j, number in enumerate(each):
                    squares.setdefault((number, shares[i]), []).append(
                        _quad(_moved(start, row, i, column, j), row, column)
                    )
            lines += _borders(values, start, row, column)
            if shade:
                tall, long = len(values), len(values[0])
                whole = _quad(start, (row[0] * tall, row[1] * tall), (column[0] * long, column[1] * long))
                shades.append(f'<path d="{whole}" fill="{shade}" fill-opacity="{opacity}"/>')
        found = []
        for (number, part), quads in squares.items():
            opacity = "" if part == 1 else f' fill-opacity="{part:.2f}"'
            found.append(f'<path fill="{colours[number]}"{opacity} {_FAINT} d="{"".join(quads)}"/>')
        borders = f'<path fill="none" stroke="{_LINE}" stroke-width="1.6" d="{"".join(lines)}"/>'
        return "\n".join([*found, *shades, borders])

    def _axes(self, first: bool) -> str:
        """The names of the axes, along the edges; the vertical one at the first block only."""
        drawn, whole = len(self.channels), self.layer.num_features
        c = "C" if drawn == whole else f"{drawn} of {whole} channels"
        x, y = self._point(self.wide / 2, 0, self.tall)
        parts = [_label(x - 5, y + 13, c, turn=30)]
        x, y = self._point(self.wide, self.deep / 2, self.tall)
        parts.append(_label(x + 5, y + 13, "N", turn=-30))
        if first and self.axes:
            x, y = self._point(0, 0, self.tall / 2)
            parts.append(_label(x - 6, y, self.axes, turn=-90))
        return "\n".join(parts)

    def _term(self, term: str, left: float, middle: float) -> tuple[str, float, float]:
        """A term of the affine map: one row of squares, one a channel, for each map that it has."""
        layer = self.layer
        maps = {"shared": 1, "class": layer.num_classes or 1, "branch": len(layer.branches or ())}
        number = maps.get(term, len(self.samples))
        shown, square, step = min(number, 4), 7.0, 12.0
        sign = "+" if term == "predicted" else "&#8594;"
        parts = [_label(left + 10, middle + 5, sign, size=16)]
        left += 24
        wide = square * len(self.channels)
        under = {
            "shared": "shared",
            "class": f"{number} classes",
            "branch": "branches",
            "style": "from a style",
            "predicted": "predicted",
        }[term]
        names = list(layer.branches or ()) if term == "branch" and self.labels else []
        beside = max((_length(n) for n in names), default=0.0)
        room = max(wide, _length(under) if self.labels else 0.0)
        start = left + (room - wide) / 2
        dots = number > shown
        y = middle - (shown * step + (8 if dots else 0)) / 2
        for k in range(shown):
            taken = term in ("style", "predicted")  # from something else: not learned as they are
            look = 'fill-opacity=".25" stroke-dasharray="2 1.5"' if taken else f'fill-opacity="{1 - 0.2 * k:.1f}"'
            cells = "".join(_quad((start + i * square, y), (square, 0), (0, square)) for i in range(len(self.channels)))
            line = _INK if taken else _LINE
            parts.append(f'<path {look} stroke="{line}" stroke-width=".8" d="{cells}"/>')
            if names:
                parts.append(_label(start + wide + 4, y + 7, escape(names[k]), anchor="start"))
            y += step
        if dots:
            parts.append(_label(start + wide / 2, y + 5, "&#8942;"))
            y += 8
        if self.labels:
            y += _FONT
            parts.append(_label(left + room / 2, y + 2, under))
        right = left + room if not names else max(left + room, start + wide + 4 + beside)
        return "\n".join(parts), right, y + 4


def _places(drawn: Sequence[int]) -> list[float]:
    """Where each place of an axis is drawn, in squares: with a gap where others are left out."""
    found = [0.0]
    for before, after in pairwise(drawn):
        found.append(found[-1] + 1 + (_GAP if after != before + 1 else 0))
    return found


def _runs(drawn: Sequence[int]) -> list[range]:
    """The positions in ``drawn`` between which nothing is left out."""
    cuts = [i for i in range(1, len(drawn)) if drawn[i] != drawn[i - 1] + 1]
    return [range(a, b) for a, b in zip((0, *cuts), (*cuts, len(drawn)), strict=True)]


def _colours(numbers: Tensor) -> dict[int, str]:  # [n, c, S]
    """A colour for every number: hues while they last, else a hue within a sample and a shade from sample to sample."""
    known = list(dict.fromkeys(numbers.flatten().tolist()))
    if len(known) <= len(_HUES):
        return {number: _HUES[i] for i, number in enumerate(known)}
    found: dict[int, str] = {}
    shade = 0
    for sample in numbers:
        each = list(dict.fromkeys(sample.flatten().tolist()))
        new = [(i, number) for i, number in enumerate(each) if number not in found]
        for i, number in new:
            found[number] = _mixed(_HUES[i % len(_HUES)], _SHADES[shade % len(_SHADES)])
        shade += bool(new)
    return found


def _mixed(colour: str, share: float) -> str:
    target = 255 if share > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + abs(share) * (target - p)):02x}" for p in parts)


def _borders(grid: list[list[int]], start: Point, row: Point, column: Point) -> list[str]:
    """The outline of a face, and the lines between values that share nothing."""
    tall, wide = len(grid), len(grid[0])
    found = [_quad(start, (row[0] * tall, row[1] * tall), (column[0] * wide, column[1] * wide))]
    for i in range(tall):
        for j in range(wide):
            if i and grid[i][j] != grid[i - 1][j]:
                found.append(_line(_moved(start, row, i, column, j), column))
            if j and grid[i][j] != grid[i][j - 1]:
                found.append(_line(_moved(start, row, i, column, j), row))
    return found


def _moved(start: Point, row: Point, i: int, column: Point, j: int) -> Point:
    return start[0] + i * row[0] + j * column[0], start[1] + i * row[1] + j * column[1]


def _quad(at: Point, a: Point, b: Point) -> str:
    return f"M{_n(at[0])} {_n(at[1])}l{_n(a[0])} {_n(a[1])} {_n(b[0])} {_n(b[1])} {_n(-a[0])} {_n(-a[1])}z"


def _line(at: Point, step: Point) -> str:
    return f"M{_n(at[0])} {_n(at[1])}l{_n(step[0])} {_n(step[1])}"


def _label(
    x: float, y: float, text: str, *, size: int = _FONT, bold: bool = False, turn: int = 0, anchor: str = "middle"
) -> str:  # fmt: skip
    """Text whose markup is already escaped."""
    turned = f' transform="rotate({turn} {_n(x)} {_n(y)})"' if turn else ""
    sized = f' font-size="{size}"' if size != _FONT else ""
    heavy = ' font-weight="600"' if bold else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{sized}{heavy}{turned}>{text}</text>'


def _length(text: str) -> float:
    """About how wide a line of text is."""
    return 0.56 * _FONT * len(text)


def _n(number: float) -> str:
    """To a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")
