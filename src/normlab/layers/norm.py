"""The module: parameters, buffers and checks around the engine. Arithmetic lives in the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..engine.arguments import check_arguments
from ..engine.backends import choice_is_lost, choice_scope, chosen, kernels, kernels_serve, must_trace
from ..engine.contract import Update
from ..engine.masks import Mask, hidden, read_mask
from ..engine.normalize import normalize
from ..gpu.traced import normalize_traced, serves
from ..statistics import running
from ..statistics.activation import activate, check_activation
from ..statistics.affine import Predicted, PredictedOfPools, parse_affine, predictor_parameters
from ..statistics.base import Sources, Statistics
from ..statistics.names import parse_statistics
from ..statistics.plans import Plan, Pooled, Segments
from ..statistics.pools import Pool
from ..statistics.running import Policy, Track
from .affine_maps import BranchTable, collapsed, needs_every_branch, predictor_tensors, separate
from .checks import (
    SHAPES,
    as_node,
    check_branches,
    check_counts,
    check_input,
    check_last_axis,
    check_place,
    check_residual,
)
from .conditions import MASKS_ROUTED, conditions, current, first_condition, plain_condition
from .memory import KnownCalls, Processes, layout_of
from .running_state import AXES, check_run_shape, observe_batch, plans_of, set_run_shape, sources_of, update_in_kernel
from .state_dict import complete_state, order_branches

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..engine.contract import Rule
    from ..engine.rows import Rows

__all__ = ["Norm", "Norm1d", "Norm2d", "Norm3d"]


_PLAIN = (Tensor, nn.Parameter)


class Norm(nn.Module):
    """Any statistics with any affine map, over ``[N, C, *S]``.

    Args:
        num_features: the number of channels C.
        statistics: which slices share a mean and a variance: ``"batch"``, ``"instance"``, ``"layer"``,
            ``"group(32)"``, ``"batch_group(512)"``, several of them (a learned mixture), ``"modes(2)"``, ``"renorm"``,
            ``"positional"``, or a :class:`normlab.Statistics` of your own.
        affine: what follows: ``"none"``, ``"shared"``, ``"class"``, ``"branch"``, ``"sandwich"``, ``"style"``,
            ``"sandwich_style"``, ``"predicted"``, or a sequence of terms. ``True`` and ``False`` as in ``torch.nn``.
            None: what the statistics bring, ``"shared"`` for almost all.
        num_classes: how many classes, for affine maps that have one for each.
        branches: names of the branches. Pools over the batch then keep one set of running statistics for each, and a
            sample's batch statistics come from the samples of its own branch only.
        ghost: pools over the batch take statistics of this many samples at a time.
        eps, momentum, track_running_stats, device, dtype: as in ``torch.nn.BatchNorm2d``. ``momentum=None`` is a
            cumulative average.
        init_std: class and branch weights, and the weight that they share in a sandwich, start from a normal
            distribution of this deviation about one.
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "dims" in cls.__dict__ and cls.__doc__ is None:  # a form of another class, see the end of each file
            cls.__doc__ = f""":class:`{cls.__mro__[1].__name__}` over ``{SHAPES[cls.dims or 2]}``."""

    def __init__(
        self,
        num_features: int,
        statistics: str | Pool | Statistics | Sequence[str | Pool] = "batch",
        affine: bool | str | Sequence[str] | None = None,
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
        nn.Module.__init__(self)  # not that of torch's batch norm, which some layers are too
        check_arguments(
            num_features=num_features, num_classes=num_classes, eps=eps, momentum=momentum, init_std=init_std,
            track_running_stats=track_running_stats, key_size=key_size, ghost=ghost,
        )  # fmt: skip
        check_place(device, dtype)
        if branches is not None:
            branches = check_branches(branches)
        statistics = parse_statistics(statistics)
        if ghost is not None:
            statistics = statistics.with_ghost(ghost)
        statistics.check(num_features)
        self.num_features, self.num_classes, self.branches = num_features, num_classes, branches
        self.statistics = statistics
        self.affine_terms = parse_affine(
            statistics.affine if affine is None else affine, num_classes is not None, branches is not None
        )
        self.eps, self.momentum, self.init_std, self.key_size = eps, momentum, init_std, key_size
        self.fused_act = check_activation(act)
        if act is not None and statistics.finishes:
            raise ValueError(f"statistics {statistics.label} bring their own activation; leave act={act!r} out")
        self._surrounds = statistics.channels_at_end or statistics.finishes  # something around the normalization
        self._followed = False  # whether modules ``drop`` and ``act`` come after it
        self.policy = Policy()
        # What is known of calls like earlier ones: how they were prepared, and what serves them at once.
        self._known_calls = KnownCalls()
        self._processes = Processes()
        self.observer: Callable[..., None] | None = None  # takes what batches show, and running statistics stay
        self._tracks: tuple[Track | None, ...] = statistics.tracks(num_features)
        self.track_running_stats = track_running_stats and any(t is not None for t in self._tracks)
        self._run_shape: tuple[int, ...] | None = None
        self._reads = running.Reads()  # running statistics as calls in training read them
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
        self._processes = Processes(group)

    @property
    def share_of_new_batch(self) -> float | None:
        """The momentum with which running statistics move; None: they are the average of all batches."""
        return self.statistics.momentum(self.momentum)

    @property
    def act(self) -> str | nn.Module | None:
        """The activation that follows: a name, where kernels run it in the same pass, or a module."""
        return self.fused_act if self._modules.get("act") is None else self._modules["act"]

    @act.setter
    def act(self, name: str | None) -> None:
        self.fused_act = check_activation(name)

    def follow(self, drop: nn.Module, act: nn.Module) -> None:
        """Let dropout and an activation follow. They are children of those names, as in the layers of timm."""
        self.drop, self.act = drop, act  # type: ignore[assignment]
        self._followed = self._surrounds = True

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
            self.branch_weight = BranchTable({b: nn.Parameter(torch.ones(c, **made)) for b in self.branches})
            self.branch_bias = BranchTable({b: nn.Parameter(torch.zeros(c, **made)) for b in self.branches})
        learned = self.statistics.parameters(c)
        self._learned = tuple(learned)
        if "predicted" in self.affine_terms:
            if self.statistics.per_position or any(p.kind == "run" for p in self.statistics.pools):
                raise ValueError("a predicted affine map needs statistics of whole channels: instance, layer, group")
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
        second = {"class", "branch"} & set(self.affine_terms)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "class_weight" or name.startswith("branch_weight.") or (name == "weight" and second):
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
            self.register_buffer("run_shape", torch.full((AXES,), -1, dtype=torch.long, device=device))

    def reset_running_stats(self) -> None:
        """Running statistics as they were at construction."""
        if not self.track_running_stats:
            return
        for names in self._buffers_of:
            if names is not None:
                getattr(self, names[0]).zero_()
                getattr(self, names[1]).fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()  # type: ignore[operator]
        set_run_shape(self, None)

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
        mask: Any = None,
    ) -> Tensor:
        """Normalize ``x``. ``condition`` is the layer's label, branch or style, whichever it takes first.

        ``residual``, of the shape of ``x``, is added before the activation. ``mask``, ``[N, *S]`` bool, is True where a
        value counts; elsewhere the output and the gradient are zero.
        """
        if isinstance(x, Proxy):
            given = {"condition": condition, "label": label, "branch": branch, "style": style}
            return as_node(self, x, given | {"residual": residual, "mask": mask})
        if mask is None and MASKS_ROUTED:
            mask = current(self).mask
        if not self._surrounds:
            return self._normalize(x, condition, label, branch, style, residual, mask)
        statistics = self.statistics
        if statistics.channels_at_end:
            check_last_axis(self, x, residual)
            x, residual = (x.movedim(-1, 1), residual.movedim(-1, 1) if isinstance(residual, Tensor) else residual)
        if mask is not None and (statistics.finishes or self._followed):
            check_input(self, x)
            mask = read_mask(mask, x)
        y = self._normalize(x, condition, label, branch, style, residual, mask)
        if statistics.finishes:
            y = statistics.finish(y, self._learned_values())
            y = y if mask is None else hidden(y, mask.valid)
        return self._then(y.movedim(1, -1) if statistics.channels_at_end else y, mask)

    def _then(self, y: Tensor, mask: Mask | None = None) -> Tensor:
        """Dropout and activation, where they follow. The output at padding stays zero."""
        if not self._followed:
            return y
        y = self.act(self.drop(y))  # type: ignore[operator]
        if mask is None:
            return y
        return hidden(y, mask.valid.movedim(1, -1) if self.statistics.channels_at_end else mask.valid)

    def _normalize(
        self, x: Tensor, condition: Any, label: Any, branch: Any, style: Any, residual: Tensor | None, mask: Any
    ) -> Tensor:
        if not torch.compiler.is_compiling() and label is branch is style is None:
            y = self._run_cached(x, condition, residual, mask.valid if type(mask) is Mask else mask)
            if y is not None:
                return y
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
        mask = None if mask is None else read_mask(mask, x)
        return self._run(x, label, 0 if branch is None else branch, style, residual, mask=mask)

    def _run_cached(self, x: Any, condition: Any, residual: Tensor | None, mask: Any) -> Tensor | None:
        """By the compiled host path, where it has served a call like this one: nothing then remains to be checked."""
        if not self._known_calls or type(x) not in _PLAIN or self.observer is not None:
            return None
        if mask is not None and type(mask) not in _PLAIN:
            return None
        label, branch = condition, 0
        if self.wants:
            found = plain_condition(self, condition, x)
            if found is None:
                return None
            label, branch = found[0], 0 if found[1] is None else found[1]
            if not isinstance(branch, int) or (self.branches is not None and needs_every_branch(self)):
                return None
        elif condition is not None:
            return None
        key = self._call_key(x, branch, residual, mask is not None)
        quick: Any = self._known_calls.get(key)
        if quick is None:
            return None
        try:
            y = quick(self, x, label, residual, mask)
        except KeyError:
            # Pruned, parametrized or replicated since: no parameter any more, but an attribute still.
            return None
        if y is not None:
            self._known_calls.scope = key[-1]
        return y

    def _call_key(self, x: Tensor, branch: int, residual: Tensor | None, masked: bool) -> tuple[Any, ...]:
        """All that decides how the layer treats ``x``, but for values that are read at each call."""
        policy = self.policy
        return (
            x.shape, x.dtype, x.device, layout_of(x), self.training, branch, residual is None, self.fused_act,
            masked,
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
        mask: Mask | None = None,
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            if not running.in_backward():
                self._known_calls.scope = chosen()
            elif choice_is_lost(scope := self._known_calls.scope):
                with choice_scope(scope):
                    return self._run(x, label, branch, style, residual, extra, mask)
        # The kernels' y has the type of x; the sum with a wider residual is of the residual's.
        alike = residual is None or torch.promote_types(x.dtype, residual.dtype) == x.dtype
        if kernels_serve(x) and alike and not must_trace(x):
            done = self._run_by_kernels(x, label, branch, style, residual, extra, mask)
            if done is not None:
                return done
        elif alike and serves(self, x) and not extra:
            done = self._run_in_graph(x, label, branch, style, residual, mask)
            if done is not None:
                return done
        y = self._run_by_passes(x, label, branch, style, extra, mask)
        if residual is not None and mask is not None:
            residual = hidden(residual, mask.valid)
        return activate(y if residual is None else y + residual, self.fused_act)

    def _run_by_kernels(
        self, x: Tensor, label: Any, branch: int | Tensor, style: Any, residual: Tensor | None,
        extra: tuple[Tensor, ...], mask: Mask | None,
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
            x.shape, x.dtype, x.device, layout_of(x), self._uses_batch(), place, policy.update, policy.guard,
            self.momentum is None, self.track_running_stats, again, mask is not None, chosen(),
        )  # fmt: skip
        try:
            ready: Any = self._known_calls[key]
        except KeyError:
            if len(self._known_calls) >= 64:
                self._known_calls.clear()
            live, spatial = self._uses_batch(), prod(x.shape[2:])
            plans = plans_of(self, x, spatial, branch, live)
            if live:
                check_counts(self, x, spatial, plans[1], mask)
            ready = self._known_calls[key] = kernels().prepare(self, x, branch, plans, mask is not None)
        if ready is None:
            return None
        if self._run_shape is not None:
            check_run_shape(self, x, ready.live)
        looks = ready.live and not x.is_cuda  # at the branches and the mask, which costs nothing there
        if looks and (each is not None or mask is not None):
            spatial = prod(x.shape[2:])
            check_counts(self, x, spatial, plans_of(self, x, spatial, branch, True)[1], mask)
        affine = separate(self, label, branch, style, x)
        y = ready(self, x, affine, residual, each, extra, None if mask is None else mask.valid.contiguous())
        if again:
            return y
        if ready.update and ready.tracks_run_shape:
            set_run_shape(self, tuple(x.shape[2:]))
        if each is not None or (looks and mask is not None):
            return y
        if (quick := ready.quick(self, x, affine, residual)) is not None:
            self._known_calls[self._call_key(x, place, residual, mask is not None)] = quick
        return y

    def _run_in_graph(
        self, x: Tensor, label: Any, branch: int | Tensor, style: Any, residual: Tensor | None, mask: Mask | None
    ) -> Tensor | None:
        """By the operators through which compiled graphs reach the kernels."""
        live = self._uses_batch()
        check_run_shape(self, x, live)
        affine = separate(self, label, branch, style, x)
        valid = None if mask is None else mask.valid
        done = normalize_traced(self, x, affine, branch, residual, valid)
        if done is None:
            return None
        y, seen, segments = done
        if live and seen:
            check_counts(self, x, prod(x.shape[2:]), segments, mask)
            self._observe(seen, segments, x)
        return y

    def _run_by_passes(
        self, x: Tensor, label: Any, branch: int | Tensor, style: Any, extra: tuple[Tensor, ...], mask: Mask | None
    ) -> Tensor:
        if self.statistics.per_position:
            return self.statistics.whole(x, *collapsed(self, label, branch, style, x), self.eps, mask)
        spatial = prod(x.shape[2:])
        live_batch = self._uses_batch()
        rows, segments, plans = plans_of(self, x, spatial, branch, live_batch)
        if live_batch:
            check_counts(self, x, spatial, segments, mask)
        check_run_shape(self, x, live_batch)
        sources = sources_of(self, plans, rows, branch, live_batch)
        rule: Rule = self.statistics.rule(sources)
        tensors = (*self.statistics.tensors(self._learned_values()), *extra)
        weight, bias = collapsed(self, label, branch, style, x)
        if self._predictor:
            of_pools = self.statistics.recorded_rule(sources)
            if of_pools is None:
                rule = Predicted(rule, rows, self.key_size)
            else:
                rule = PredictedOfPools(of_pools, rows, self.key_size)
            tensors = (*tensors, *predictor_tensors(self, weight, bias, x))
            weight = bias = None
        y, seen = normalize(x, rule, tensors, weight=weight, bias=bias, rows=rows, mask=mask)
        if live_batch and (x.shape[0] or self.process_group is not None):
            self._observe(seen, segments, x)
        return y

    def _observe(self, seen: Sequence[Pooled | None], segments: Sequence[Segments], x: Tensor) -> None:
        """Take notice of what a batch showed of each pool."""
        observe_batch(self, seen, segments, x)

    # What kernels ask of the layer: they cannot import from here.

    def _sources(self, plans: tuple[Plan, ...], rows: Rows, branch: int | Tensor, live_batch: bool) -> Sources:
        return sources_of(self, plans, rows, branch, live_batch)

    def _update_in_kernel(self, segments: Sequence[Segments]) -> Update | None:
        return update_in_kernel(self, segments)

    def _predictor_tensors(self, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
        return predictor_tensors(self, weight, bias, x)

    def _learned_values(self) -> dict[str, Tensor]:
        """What the statistics have learned, by name; parametrized, where it is."""
        return {n: getattr(self, n) for n in self._learned}

    def _uses_batch(self) -> bool:
        """Whether pools over the batch take the batch's statistics now."""
        if not self.track_running_stats:
            return True
        forced = self.policy.normalize_with
        return self.training if forced is None else forced == "batch"

    # --- running statistics -------------------------------------------------------------------------------------

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
        order_branches(self, state_dict, prefix, local_metadata.get("branches"))
        complete_state(self, state_dict, prefix)
        nn.Module._load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
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
        if self.fused_act is not None:
            parts.append(f"act={self.fused_act}")
        if any(p.over_batch for p in self.statistics.pools):
            parts.append(f"momentum={self.momentum}")
            if not self.track_running_stats:
                parts.append("track_running_stats=False")
        if self.process_group is not None:
            parts.append("synchronized")
        if self.policy != Policy():
            parts.append(f"policy={self.policy}")
        return ", ".join(parts)


# fmt: off
class Norm1d(Norm): dims = 1
class Norm2d(Norm): dims = 2
class Norm3d(Norm): dims = 3
# fmt: on
