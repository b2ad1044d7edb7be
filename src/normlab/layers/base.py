"""The module: parameters, buffers and checks around the engine. Arithmetic lives in the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .. import running
from .._cache import remembered
from .._text import check_number, nearest
from ..activation import activate, check_activation
from ..affine import (
    Predicted,
    PredictedOfPools,
    compose,
    parse_affine,
    predictor_parameters,
    select,
    select_branch,
)
from ..backend import chosen, kernels_serve, must_trace, out_of_sight, rerun_in
from ..engine import MOVED, StyleMoments, Update, normalize, slice_moments
from ..pools import POOLS, Plan, Pool, Pooled, Segments, make_segments, parse_pool, rows_for
from ..positional import normalize_positions
from ..rules import Kalman, Mixture, Modes, Positional, Renorm, Single, Sources, Statistics
from ..running import Policy, Track
from .checks import (
    as_node,
    check_branches,
    check_counts,
    check_input,
    check_residual,
    check_transform,
    conditions,
    first_condition,
    plain_condition,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..calibrate import Observer
    from ..engine import Rows, Rule
    from ..fused import Affine
    from .ready import Quick, Ready, ReadyModes, ReadyPositions, ReadyRecorded

__all__ = ["Norm", "Norm1d", "Norm2d", "Norm3d", "parse_statistics"]

_PLAIN = (Tensor, nn.Parameter)
_AXES = 8  # spatial axes that a tracked resolution may have


def parse_statistics(statistics: str | Pool | Statistics | Sequence[str | Pool]) -> Statistics:
    """Statistics from a name, a pool, several pools (a mixture), or statistics themselves."""
    if isinstance(statistics, Statistics):
        return statistics
    if isinstance(statistics, Pool):
        return Single(statistics)
    if isinstance(statistics, str):
        if statistics == "renorm":
            return Renorm()
        if statistics == "positional":
            return Positional()
        if statistics.startswith("modes"):
            inner = statistics[5:].strip("()") or "2"
            if inner.isdigit():
                return Modes(int(inner))
        if statistics.partition("(")[0].partition("/")[0].strip() not in POOLS:
            known = (*POOLS, "modes(2)", "renorm", "positional")
            raise ValueError(f"there are no statistics {statistics!r}; {nearest(statistics, known)}")
        return Single(parse_pool(statistics))
    if not isinstance(statistics, Sequence):
        raise TypeError(
            "statistics are a name such as 'batch', a Pool, several of them, or a Statistics; "
            f"got {type(statistics).__name__}"
        )
    return Mixture.of(statistics)


class Norm(nn.Module):
    """Any statistics with any affine map, over ``[N, C, *S]``.

    Args:
        num_features: the number of channels C.
        statistics: which slices share a mean and a variance: ``"batch"``, ``"instance"``, ``"layer"``,
            ``"group(32)"``, ``"batch_group(512)"``, several of them (a learned mixture), ``"modes(2)"``, ``"renorm"``,
            ``"positional"``, or a :class:`normlab.Statistics` of your own.
        affine: what follows: ``"none"``, ``"shared"``, ``"class"``, ``"branch"``, ``"sandwich"``, ``"style"``,
            ``"sandwich_style"``, ``"predicted"``, or a sequence of terms. ``True`` and ``False`` as in ``torch.nn``.
        num_classes: how many classes, for affine maps that have one for each.
        branches: names of the branches. Pools over the batch then keep one set of running statistics for each, and a
            sample's batch statistics come from the samples of its own branch only.
        ghost: pools over the batch take statistics of this many samples at a time.
        eps, momentum, track_running_stats, device, dtype: as in ``torch.nn.BatchNorm2d``. ``momentum=None`` is a
            cumulative average.
        init_std: class and branch weights start from a normal distribution of this deviation about one.
        key_size: channels a key, for ``"predicted"``.
        act: an activation that follows, ``"relu"``, ``"leaky_relu"`` or ``"silu"``; where kernels run, in the same pass
            over the input. A ``residual`` given to ``forward`` is added before it.

    >>> import torch
    >>> layer = Norm2d(8, statistics=("instance", "batch"), affine="sandwich", num_classes=10)
    >>> layer(torch.randn(4, 8, 6, 6), torch.tensor([0, 3, 3, 9])).shape
    torch.Size([4, 8, 6, 6])
    """

    _version = 1
    dims: ClassVar[int | None] = None

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        num_features: int,
        statistics: str | Pool | Statistics | Sequence[str | Pool] = "batch",
        affine: bool | str | Sequence[str] = "shared",
        *,
        num_classes: int | None = None,
        branches: Sequence[str] | None = None,
        ghost: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        init_std: float = 0.0,
        key_size: int = 16,
        act: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(num_features, bool) or not isinstance(num_features, Integral):
            raise TypeError(f"num_features is the number of channels, an integer; got {num_features!r}")
        if num_features < 1:
            raise ValueError(f"num_features is {num_features}; a layer needs at least one channel")
        if not isinstance(eps, Real) or not (momentum is None or isinstance(momentum, Real)):
            raise TypeError(
                f"eps and momentum are numbers (momentum may be None); got {eps!r} and {momentum!r}"
            )
        if not eps >= 0:
            raise ValueError(f"eps is {eps}; it must not be negative")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(
                f"momentum is {momentum}; it is the share of the new batch, between 0 and 1 (or None for the average "
                "of all batches)"
            )
        if num_classes is not None:
            check_number(num_classes, "num_classes")
        if not isinstance(init_std, Real) or not init_std >= 0:
            raise ValueError(f"init_std is a deviation, a number of at least 0; got {init_std!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype is a floating-point type such as torch.float32; got {dtype!r}")
        if branches is not None:
            branches = check_branches(branches)
        statistics = parse_statistics(statistics)
        if ghost is not None:
            statistics = _with_ghost(statistics, ghost)
        statistics.check(num_features)
        self.num_features, self.num_classes, self.branches = num_features, num_classes, branches
        self.statistics = statistics
        self.affine_terms = parse_affine(affine, num_classes is not None, branches is not None)
        self.eps, self.momentum, self.init_std, self.key_size = eps, momentum, init_std, key_size
        self.act = check_activation(act)
        self.policy = Policy()
        # What is known of calls like earlier ones: how they were prepared, and what serves them at once.
        self._ready = _Known()
        self._processes = _Processes()
        self.observer: Observer | None = None
        self._tracks: tuple[Track | None, ...] = statistics.tracks(num_features)
        self.track_running_stats = track_running_stats and any(t is not None for t in self._tracks)
        self._run_shape: tuple[int, ...] | None = None
        self._read: tuple[list[Any], Tensor] | None = (
            None  # of the running statistics, where training reads them
        )
        per_branch = "branch" in self.affine_terms or self.track_running_stats
        separated = branches is not None and (per_branch or any(p.over_batch for p in statistics.pools))
        self.wants = frozenset(
            name
            for name, wanted in (
                ("label", "class" in self.affine_terms),
                ("branch", separated),
                ("style", "style" in self.affine_terms),
            )
            if wanted
        )
        self._make_parameters(device, dtype)
        self._make_buffers(device, dtype)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes that share batch statistics, set by :func:`normlab.sync`; None: this one alone."""
        return self._processes.group

    @process_group.setter
    def process_group(self, group: ProcessGroup | None) -> None:
        self._processes = _Processes(group)

    # --- construction -------------------------------------------------------------------------------------------

    def _make_parameters(self, device: Any, dtype: torch.dtype | None) -> None:
        made = {"device": device, "dtype": dtype}
        c = self.num_features
        if "shared" in self.affine_terms:
            self.weight = nn.Parameter(torch.ones(c, **made))
            self.bias = nn.Parameter(torch.zeros(c, **made))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        if "class" in self.affine_terms:
            assert self.num_classes is not None
            self.class_weight = nn.Parameter(torch.ones(self.num_classes, c, **made))
            self.class_bias = nn.Parameter(torch.zeros(self.num_classes, c, **made))
        if "branch" in self.affine_terms:
            assert self.branches is not None
            self.branch_weight = nn.ParameterDict(
                {b: nn.Parameter(torch.ones(c, **made)) for b in self.branches}
            )
            self.branch_bias = nn.ParameterDict(
                {b: nn.Parameter(torch.zeros(c, **made)) for b in self.branches}
            )
        learned = self.statistics.parameters(c)
        self._learned = tuple(learned)
        if "predicted" in self.affine_terms:
            if isinstance(self.statistics, Positional) or any(p.kind == "run" for p in self.statistics.pools):
                raise ValueError(
                    "a predicted affine map needs statistics of whole channels: instance, layer, group"
                )
            predictor = predictor_parameters(c, self.key_size)
            self._predictor = tuple(predictor)
            learned = {**learned, **predictor}
        else:
            self._predictor = ()
        for name, value in learned.items():
            value = value.to(device=device, dtype=dtype or torch.get_default_dtype())
            if name == "radius":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        self._jitter()

    def _jitter(self) -> None:
        if not self.init_std:
            return
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "class_weight" or name.startswith("branch_weight."):
                    parameter.normal_(1, self.init_std)

    def _make_buffers(self, device: Any, dtype: torch.dtype | None) -> None:
        lead = () if self.branches is None else (len(self.branches),)
        number = 0
        self._buffers_of: list[tuple[str, str] | None] = []
        for track in self._tracks:
            if track is None or not self.track_running_stats:
                self._buffers_of.append(None)
                continue
            number += 1
            suffix = "" if number == 1 else f"_{number}"
            names = (f"running_mean{suffix}", f"running_var{suffix}")
            self.register_buffer(names[0], torch.zeros(*lead, *track.shape, device=device, dtype=dtype))
            self.register_buffer(names[1], torch.ones(*lead, *track.shape, device=device, dtype=dtype))
            self._buffers_of.append(names)
        if number:
            self.register_buffer("num_batches_tracked", torch.zeros(lead, dtype=torch.long, device=device))
        else:
            self.register_buffer("running_mean", None)
            self.register_buffer("running_var", None)
            self.register_buffer("num_batches_tracked", None)
        if number and any(p.crosses_channels(self.num_features) for p in self.statistics.pools):
            # Runs that cross channels mean other positions at another resolution: it travels with the statistics.
            self.register_buffer("run_shape", torch.full((_AXES,), -1, dtype=torch.long, device=device))

    def reset_running_stats(self) -> None:
        """Running statistics as they were at construction."""
        for names in self._buffers_of:
            if names is not None:
                getattr(self, names[0]).zero_()
                getattr(self, names[1]).fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()  # type: ignore[operator]
        self._set_run_shape(None)

    def reset_parameters(self) -> None:
        """Parameters and running statistics as they were at construction."""
        self.reset_running_stats()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in ("weight", "class_weight") or name.startswith("branch_weight."):
                    parameter.fill_(1)
                elif name in ("bias", "class_bias") or name.startswith("branch_bias."):
                    parameter.zero_()
            fresh = self.statistics.parameters(self.num_features)
            if self._predictor:
                fresh |= predictor_parameters(self.num_features, self.key_size)
            for name, value in fresh.items():
                getattr(self, name).copy_(value)
        self._jitter()

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        condition: Any = None,
        *,
        label: Any = None,
        branch: Any = None,
        style: Any = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Normalize ``x``. ``condition`` is the layer's label, branch or style, whichever it takes first.

        ``residual``, of the shape of ``x``, is added before the activation.
        """
        if not torch.compiler.is_compiling() and label is branch is style is None:
            y = self._as_before(x, condition, residual)
            if y is not None:
                return y
        if isinstance(x, Proxy):
            given = {"condition": condition, "label": label, "branch": branch, "style": style}
            return as_node(self, x, given | {"residual": residual})
        check_input(self, x)
        if residual is not None:
            check_residual(self, x, residual)
        if self.wants or not (condition is label is branch is style is None):
            found = plain_condition(self, condition, x) if label is branch is style is None else None
            if found is not None:
                label, branch = found
            else:
                given = {"label": label, "branch": branch, "style": style}
                if condition is not None:
                    given[first_condition(self)] = condition
                label, branch, style = conditions(self, given, x)
        return self._run(x, label, 0 if branch is None else branch, style, residual)

    def _as_before(self, x: Any, condition: Any, residual: Tensor | None) -> Tensor | None:
        """By the compiled host path, where it has served a call like this one: nothing then remains to be checked."""
        if not self._ready or type(x) not in _PLAIN or self.observer is not None:
            return None
        label, branch = condition, 0
        if self.wants:
            found = plain_condition(self, condition, x)
            if found is None:
                return None
            label, branch = found[0], 0 if found[1] is None else found[1]
            if not isinstance(branch, int):
                return None
        elif condition is not None:
            return None
        key = self._quick_key(x, branch, residual)
        quick: Any = self._ready.get(key)
        if quick is None:
            return None
        try:
            y = quick(self, x, label, residual)
        except KeyError:
            # Pruned, parametrized or replicated since: no parameter any more, but an attribute still.
            return None
        if y is not None:
            self._ready.scope = key[-1]
        return y

    def _quick_key(self, x: Tensor, branch: int, residual: Tensor | None) -> tuple[Any, ...]:
        """All that decides how the layer treats ``x``, but for values that are read at each call."""
        policy = self.policy
        return (
            x.shape, x.dtype, x.device, _layout(x), self.training, branch, residual is None, self.act,
            policy.normalize_with, policy.update, policy.guard, self.process_group is None, self.track_running_stats,
            chosen(),
        )  # fmt: skip

    def _run(
        self,
        x: Tensor,
        label: Any,
        branch: int | Tensor,
        style: Any,
        residual: Tensor | None = None,
        extra: tuple[Tensor, ...] = (),
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            if not running.in_backward():
                self._ready.scope = chosen()
            elif out_of_sight(scope := self._ready.scope):
                with rerun_in(scope):
                    return self._run(x, label, branch, style, residual, extra)
        # The kernels' y has the type of x; the sum with a wider residual is of the residual's.
        alike = residual is None or torch.promote_types(x.dtype, residual.dtype) == x.dtype
        if kernels_serve(x) and alike and not must_trace(x):
            done = self._at_once(x, label, branch, style, residual, extra)
            if done is not None:
                return done
        y = self._in_steps(x, label, branch, style, extra)
        return activate(y if residual is None else y + residual, self.act)

    def _at_once(
        self, x: Tensor, label: Any, branch: int | Tensor, style: Any, residual: Tensor | None,
        extra: tuple[Tensor, ...],
    ) -> Tensor | None:  # fmt: skip
        """By the kernels for whole normalizers, where they have all that this call asks for."""
        if self.observer is not None or self.process_group is not None:
            return None
        # Checkpointing runs a call again as it ran before, for it pairs what both saved, but nothing moves.
        policy, each, again = self.policy, None, running.in_backward()
        if isinstance(branch, Tensor):
            branch = each = branch.contiguous()
        place = -1 if isinstance(branch, Tensor) else branch
        key = (
            x.shape, x.dtype, x.device, _layout(x), self._uses_batch(), place, policy.update, policy.guard,
            self.momentum is None, self.track_running_stats, again, chosen(),
        )  # fmt: skip
        try:
            ready: Any = self._ready[key]
        except KeyError:
            from .ready import prepare  # imports triton

            if len(self._ready) >= 64:
                self._ready.clear()
            ready = self._ready[key] = prepare(self, x, branch)
        if ready is None:
            return None
        if self._run_shape is not None:
            self._check_run_shape(x, ready.live)
        if each is not None and ready.live and not x.is_cuda:  # looking at the branches costs nothing there
            spatial = prod(x.shape[2:])
            check_counts(self, x, spatial, self._plans(x, spatial, each, True)[1])
        affine = self._two_affines(label, branch, style, x)
        y = ready(self, x, affine, residual, each, extra)
        if again:
            return y
        if ready.update and ready.cut:
            self._set_run_shape(tuple(x.shape[2:]))
        if each is None and (quick := ready.quick(self, x, affine, residual)) is not None:
            self._ready[self._quick_key(x, place, residual)] = quick
        return y

    def _in_steps(
        self, x: Tensor, label: Any, branch: int | Tensor, style: Any, extra: tuple[Tensor, ...]
    ) -> Tensor:
        if isinstance(self.statistics, Positional):
            return normalize_positions(x, *self._affine(label, branch, style, x), self.eps)
        spatial = prod(x.shape[2:])
        live_batch = self._uses_batch()
        rows, segments, plans = self._plans(x, spatial, branch, live_batch)
        if live_batch:
            check_counts(self, x, spatial, segments)
        self._check_run_shape(x, live_batch)
        sources = self._sources(plans, rows, branch, live_batch)
        rule: Rule = self.statistics.rule(sources)
        tensors = (*self.statistics.tensors(self._learned_values()), *extra)
        weight, bias = self._affine(label, branch, style, x)
        if self._predictor:
            of_pools = self.statistics.recorded_rule(sources)
            if of_pools is None:
                rule = Predicted(rule, rows, self.key_size)
            else:
                rule = PredictedOfPools(of_pools, rows, self.key_size)
            tensors = (*tensors, *self._predicting(weight, bias, x))
            weight = bias = None
        moves = live_batch and kernels_serve(x) and not running.in_backward()
        update = self._update_in_kernel(segments) if moves else None
        y, seen = normalize(x, rule, tensors, weight=weight, bias=bias, rows=rows, update=update)
        if seen is MOVED:
            self._set_run_shape(tuple(x.shape[2:]))
        elif live_batch and (x.shape[0] or self.process_group is not None):
            self._observe(seen, segments, x)
        return y

    def _predicting(self, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
        """What a predicted affine map is made of: the weight and bias so far, the embedding and the heads."""
        ones = x.new_ones(1, 1) if weight is None else weight
        zeros = x.new_zeros(1, 1) if bias is None else bias
        return ones, zeros, *(getattr(self, n) for n in self._predictor)

    def _learned_values(self) -> dict[str, Tensor]:
        """What the statistics have learned, by name; parametrized, where it is."""
        return {n: getattr(self, n) for n in self._learned}

    def _uses_batch(self) -> bool:
        """Whether pools over the batch take the batch's statistics now."""
        if not self.track_running_stats:
            return True
        forced = self.policy.normalize_with
        return self.training if forced is None else forced == "batch"

    def _plans(
        self, x: Tensor, spatial: int, branch: int | Tensor, live_batch: bool
    ) -> tuple[Rows, tuple[Segments, ...], tuple[Plan, ...]]:
        branches = 1 if self.branches is None else len(self.branches)
        if self.branches is not None and self.process_group is not None and isinstance(branch, int):
            # Other ranks may run other branches: all exchange statistics of all of them.
            branch = torch.full((x.shape[0],), branch, device=x.device)
        make = _plans if isinstance(branch, Tensor) else _cached_plans
        pools, c, n = self.statistics.pools, self.num_features, x.shape[0]
        return make(pools, c, spatial, n, branches, branch, x.device, self.process_group, live_batch)

    def _sources(
        self, plans: tuple[Plan, ...], rows: Rows, branch: int | Tensor, live_batch: bool
    ) -> Sources:
        stored: list[tuple[Tensor, Tensor] | None] = []
        for plan, names, track in zip(plans, self._buffers_of, self._tracks, strict=True):
            if names is None or track is None or (live_batch and not self.statistics.reads_running):
                stored.append(None)
                continue
            mean, var = (self._of_branch(getattr(self, n), branch) for n in names)  # [1 or N, *shape]
            if len(track.shape) == 1:
                spread = Plan(replace(plan.pool, over_batch=False, ghost=None), rows, Segments())
                mean, var = spread.expand(mean), spread.expand(var)
            # What backward reads must not move with the buffers.
            if live_batch:
                mean, var = running.snapshot(mean), running.snapshot(var)
            elif torch.is_grad_enabled():
                mean, var = mean.clone(), var.clone()
            stored.append((mean, var))
        live = tuple(live_batch or not pool.over_batch for pool in self.statistics.pools)
        batches = self.num_batches_tracked
        if isinstance(batches, Tensor) and self.branches is not None:
            batches = batches[branch] if isinstance(branch, int) else batches[branch].unsqueeze(1)
        if live_batch and self.statistics.reads_running and isinstance(batches, Tensor):
            batches = running.snapshot(batches)
            if running.in_backward() and self._read is not None:
                stored, batches = self._read  # activation checkpointing: what the first forward pass read
            elif not torch.compiler.is_compiling():
                self._read = (stored, batches)
        return Sources(plans, tuple(stored), live, batches, self.eps)  # type: ignore[arg-type]

    def _of_branch(self, buffer: Tensor, branch: int | Tensor) -> Tensor:
        if self.branches is None:
            return buffer.unsqueeze(0)
        return buffer[branch : branch + 1] if isinstance(branch, int) else buffer.index_select(0, branch)

    def _two_affines(self, label: Any, branch: int | Tensor, style: Any, x: Tensor) -> Affine:
        """The affine maps as the kernels take them: a shared one, then one of the batch, of labels or of samples."""
        from ..fused import Affine

        terms = self.affine_terms
        if terms == ("shared",):
            return Affine(*self._shared())
        if len(terms) > 2 or (len(terms) == 2 and terms[0] != "shared"):
            return Affine(None, None, *self._affine(label, branch, style, x))
        shared = self._shared() if terms[:1] == ("shared",) else (None, None)
        last = terms[-1] if terms else None
        if last == "class":
            tables = self.class_weight, self.class_bias
            if isinstance(label, Tensor):
                return Affine(*shared, *tables, label.contiguous())
            return Affine(*shared, *(select(t, label) for t in tables))  # type: ignore[arg-type]
        if last == "branch":
            assert self.branches is not None
            if isinstance(branch, Tensor):
                both: Any = (self.branch_weight, self.branch_bias)
                weight, bias = (torch.stack([t[b] for b in self.branches]) for t in both)
                return Affine(*shared, weight, bias, branch, few=True)
            name = self.branches[branch]
            pair = self.branch_weight[name], self.branch_bias[name]
            return Affine(*pair) if len(terms) == 1 else Affine(*shared, *pair)
        if last == "style":
            found = self._style(style, x)
            return Affine(*shared, found.std, found.mean)
        return Affine(*shared)

    def _affine(
        self, label: Any, branch: int | Tensor, style: Any, x: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The effective weight and bias, ``[C]``, ``[1, C]`` or ``[N, C]``."""
        terms: list[tuple[Tensor, Tensor]] = []
        for term in self.affine_terms:
            if term == "shared":
                terms.append(self._shared())
            elif term == "class":
                terms.append((select(self.class_weight, label), select(self.class_bias, label)))
            elif term == "branch":
                assert self.branches is not None
                w = select_branch(self.branch_weight, self.branches, branch)  # type: ignore[arg-type]
                b = select_branch(self.branch_bias, self.branches, branch)  # type: ignore[arg-type]
                terms.append((w, b))
            elif term == "style":
                found = self._style(style, x)
                terms.append((found.std, found.mean))
        return compose(terms)

    def _shared(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, or a sentence where one was taken away."""
        weight, bias = self.weight, self.bias
        if weight is None or bias is None:
            gone = "weight" if weight is None else "bias"
            raise ValueError(
                f"the {gone} of {type(self).__name__} is None, and its affine map needs both weight and bias; fill it "
                f"with {'ones' if weight is None else 'zeros'} instead, or make the layer without an affine map"
            )
        c = self.num_features
        if weight.numel() != c or bias.numel() != c:
            for name, t in (("weight", weight), ("bias", bias)):
                if t.numel() not in (1, c):
                    raise ValueError(
                        f"the {name} of {type(self).__name__} has {t.numel()} values and the layer {c} channels; give "
                        f"it {c}, or one for all"
                    )
            weight, bias = weight.reshape(-1).expand(c), bias.reshape(-1).expand(c)
        return weight, bias

    def _style(self, style: Any, x: Tensor | None) -> StyleMoments:
        if not isinstance(style, StyleMoments):
            moments = slice_moments(style)
            style = StyleMoments(moments.mean, (moments.var + self.eps).sqrt())
        if x is not None and style.mean.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"the style has {style.mean.shape[0]} samples and the content {x.shape[0]}; "
                "give one style for each, or one for all"
            )
        return style

    # --- running statistics -------------------------------------------------------------------------------------

    def _observe(self, seen: Sequence[Pooled | None], segments: Sequence[Segments], x: Tensor) -> None:
        if not self.track_running_stats or not self.policy.update or running.in_backward():
            return
        if self.observer is not None:
            self.observer(self, seen, segments, tuple(x.shape[2:]))
            return
        # Detached, and not under no_grad, whose blocks without a result torch.export cannot load again.
        tracked = [
            (names, _detached(pooled), s, track.how)
            for names, pooled, s, track in zip(self._buffers_of, seen, segments, self._tracks, strict=True)
            if names is not None and pooled is not None and track is not None
        ]
        if not tracked:
            return
        check_transform(self, tracked[0][1].mean, getattr(self, tracked[0][0][0]))
        branches = None if self.branches is None else len(self.branches)
        batches = self.num_batches_tracked
        assert isinstance(batches, Tensor)
        if kernels_serve(x) and not must_trace(x) and self._move_by_kernel(tracked, batches):
            self._set_run_shape(tuple(x.shape[2:]))
            return
        guard = getattr(self, tracked[0][0][1]).dtype if self.policy.guard else None
        ok = running.acceptable([t[1] for t in tracked], tracked[0][2], branches, guard)
        running.count_(batches, tracked[0][2], branches, ok)
        for names, pooled, s, how in tracked:
            mean, var = (getattr(self, n) for n in names)
            running.update_(mean, var, batches, pooled, s, branches, self._share(), how, self.eps, ok)
        self._set_run_shape(tuple(x.shape[2:]), ok)

    def _move_by_kernel(self, tracked: Sequence[tuple[Any, Pooled, Segments, str]], batches: Tensor) -> bool:
        """Move running statistics, one kernel each, and say whether that is done: of one branch, without a policy."""
        if self.policy.guard or self.process_group is not None:
            return False
        found = []
        for names, pooled, s, how in tracked:
            mean, var = (getattr(self, n) for n in names)
            branch, count = s.branch, pooled.count
            plain = mean.dtype == var.dtype == pooled.mean.dtype == pooled.var.dtype == torch.float32
            plain = plain and mean.device == var.device == batches.device == pooled.mean.device
            each = isinstance(count, Tensor)
            known = not each or count.shape in (pooled.mean.shape, (pooled.mean.shape[0], 1))
            if not plain or isinstance(branch, Tensor) or how == "deviation" or not known:
                return False
            if self.branches is not None:
                mean, var = mean[branch], var[branch]
            if mean.dim() != 1 or not (mean.is_contiguous() and var.is_contiguous()):
                return False
            found.append((mean, var, pooled, how == "total"))
        counter = batches if self.branches is None else batches[tracked[0][2].branch]
        from .. import passes  # imports triton

        for k, (mean, var, pooled, total) in enumerate(found):
            passes.move(mean, var, counter, pooled, self._share(), total, k == len(found) - 1)
        return True

    def _update_in_kernel(self, segments: Sequence[Segments]) -> Update | None:
        """Running statistics that a kernel may move on the way: one pool over the batch, no policy.

        All branches' where each sample has a branch of its own, and then not by ghost batch.
        """
        policy = self.policy
        tracked = [k for k, names in enumerate(self._buffers_of) if names is not None]
        moves = self.track_running_stats and policy.update and not policy.guard and self.observer is None
        if len(tracked) != 1 or not moves:
            return None
        k = tracked[0]
        names, track, momentum = self._buffers_of[k], self._tracks[k], self._share()
        assert names is not None and track is not None
        how = {Renorm: "deviation", Modes: "total"}.get(type(self.statistics), "unbiased")
        each = isinstance(segments[k].branch, Tensor)
        whole = segments[k].number == (1 if self.branches is None or not each else len(self.branches))
        simple = (whole or segments[k].ghost > 0) and self.process_group is None
        if momentum is None or track.how != how or not simple:
            return None
        mean, var = (getattr(self, n) for n in names)
        batches = self.num_batches_tracked
        if mean.dtype != torch.float32 or not isinstance(batches, Tensor):
            return None
        if self.branches is not None and not each:
            branch = segments[k].branch
            mean, var, batches = mean[branch], var[branch], batches[branch]
        return Update(mean, var, batches, momentum)

    def _share(self) -> float | None:
        average = isinstance(self.statistics, Mixture) and self.statistics.average == "batch"
        return None if average else self.momentum

    def _set_run_shape(self, shape: tuple[int, ...] | None, ok: Tensor | None = None) -> None:
        stored = getattr(self, "run_shape", None)
        # A buffer that to_empty() made has any values, so a reset writes in any case.
        if stored is None or (shape is not None and shape == self._run_shape):
            return
        if self.policy.guard and ok is not None and not ok.any():  # a refused batch leaves no trace
            return
        self._run_shape = shape
        filled = (-1,) * _AXES if shape is None else (*shape, *(-1,) * (_AXES - len(shape)))
        for i, size in enumerate(filled):
            stored[i] = size

    def _check_run_shape(self, x: Tensor, live_batch: bool) -> None:
        if self._run_shape is None or self.observer is not None or (live_batch and not self.policy.update):
            return
        if tuple(x.shape[2:]) != self._run_shape:
            raise ValueError(
                f"this layer tracked its groups at resolution {list(self._run_shape)} and was given "
                f"{list(x.shape[2:])}; its {self._groups()} groups cross the borders of the {self.num_features} "
                "channels, so they cover other positions now. Use a group number that divides the channels, keep the "
                "resolution, or call reset_running_stats() and calibrate() at the new one"
            )

    def _groups(self) -> int:
        return next(p.groups or 1 for p in self.statistics.pools if p.crosses_channels(self.num_features))

    # --- state dicts --------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        about = getattr(destination, "_metadata", None)
        if self.branches is not None and about is not None:
            about.setdefault(prefix[:-1], {})["branches"] = list(self.branches)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # What the layer can take over from plain batch norm is completed in place, so torch's strict check sees it.
        from ..adopt import complete_state, order_branches

        order_branches(self, state_dict, prefix, local_metadata.get("branches"))
        complete_state(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        stored = getattr(self, "run_shape", None)
        if stored is not None and not stored.is_meta:
            found = tuple(int(s) for s in stored.tolist() if s >= 0)
            self._run_shape = found or None

    # --- words --------------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        terms = "+".join(self.affine_terms) or "none"
        parts = [str(self.num_features), f"statistics={self.statistics.label}", f"affine={terms}"]
        if self.num_classes is not None:
            parts.append(f"num_classes={self.num_classes}")
        if self.branches is not None:
            parts.append(f"branches=({', '.join(self.branches)})")
        parts.append(f"eps={self.eps:g}")
        if self.act is not None:
            parts.append(f"act={self.act}")
        if any(p.over_batch for p in self.statistics.pools):
            parts.append(f"momentum={self.momentum}")
            if not self.track_running_stats:
                parts.append("track_running_stats=False")
        if self.process_group is not None:
            parts.append("synchronized")
        if self.policy != Policy():
            parts.append(f"policy={self.policy}")
        return ", ".join(parts)


class _Known(dict[Any, "Ready | ReadyModes | ReadyPositions | ReadyRecorded | Quick | None"]):
    """What a layer knows of earlier calls. A copy of the layer begins without: compiled kernels stay here.

    Not by the layer's ``__getstate__``, which parametrized modules have one of their own for. The attributes are of the
    last forward pass, for checkpointing to run it again as it ran.
    """

    scope: Any = None  # what was chosen of back ends
    by_torch = False  # whether torch's operator served it

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return _Known, ()


class _Processes:
    """A process group, which torch can neither copy nor pickle. A copy of the layer has the same, a file none."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Processes:
        return self

    def __reduce__(self) -> tuple[type[_Processes], tuple[()]]:
        return _Processes, ()


def _detached(pooled: Pooled) -> Pooled:
    count = pooled.count
    count = count.detach() if isinstance(count, Tensor) else count
    return Pooled(pooled.mean.detach(), pooled.var.detach(), count)


def _layout(x: Tensor) -> bool | tuple[int, ...]:
    """What tells layouts apart: a tensor that is not contiguous may be channels last, or have gaps."""
    return x.is_contiguous() or x.stride()


def _plans(
    pools: tuple[Pool, ...], channels: int, spatial: int, samples: int, branches: int, branch: int | Tensor,
    device: torch.device, process_group: ProcessGroup | None, live_batch: bool,
) -> tuple[Rows, tuple[Segments, ...], tuple[Plan, ...]]:  # fmt: skip
    """Rows, segments and plans of every pool for one shape of input."""
    rows = rows_for(pools, channels, spatial)
    segments = tuple(
        make_segments(samples, p.ghost, branches, branch, device)
        if p.over_batch and live_batch
        else Segments()
        for p in pools
    )
    return (
        rows,
        segments,
        tuple(Plan(p, rows, s, process_group) for p, s in zip(pools, segments, strict=True)),
    )


_cached_plans = remembered(_plans)


def _with_ghost(statistics: Statistics, ghost: int) -> Statistics:
    if isinstance(statistics, Single):
        return replace(statistics, pool=replace(statistics.pool, ghost=ghost))
    if isinstance(statistics, Mixture):
        if not any(p.over_batch for p in statistics.members):
            raise ValueError(f"ghost={ghost} needs a pool over the batch; {statistics.label} has none")
        members = tuple(replace(p, ghost=ghost) if p.over_batch else p for p in statistics.members)
        return replace(statistics, members=members)
    if isinstance(statistics, (Kalman, Modes, Renorm)):
        check_number(ghost, "ghost", " samples a statistic")
        return replace(statistics, ghost=ghost)
    raise ValueError(
        f"{type(statistics).__name__} does not take ghost=...; give its pools a ghost size, as in 'batch/ghost=4'"
    )


class Norm1d(Norm):
    """:class:`Norm` over ``[N, C]`` or ``[N, C, L]``."""

    dims = 1


class Norm2d(Norm):
    """:class:`Norm` over ``[N, C, H, W]``."""

    dims = 2


class Norm3d(Norm):
    """:class:`Norm` over ``[N, C, T, H, W]``."""

    dims = 3
