"""Synchronized statistics: several processes compute what one computes with the whole batch.

Starting processes costs seconds, so each group of processes runs every case once and stores what it saw; the tests
compare that with one process.
"""

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import normlab
from normlab import sync, unsync
from processes import filled_once, join, run_ranks

BRANCHES = ("main", "aux")
STEPS = 3


class HalfWay(normlab.Statistics):
    """A user's own rule: centred on the batch, scaled by half the batch's and half the layer's variance."""

    pools = (normlab.Pool("channel", True), normlab.Pool("group", False, 1))

    def combine(self, statistics, *tensors, eps):
        (mean, var), (_, own) = statistics
        return normlab.Coefficients(mean, torch.rsqrt((var + own) / 2 + eps))


@dataclass(frozen=True)
class Case:
    """A layer, the shape of a sample, and what is passed along with each batch of samples ``[start, end)``."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6, 4, 3)
    along: Callable[[int, int, int], dict[str, Any]] = lambda start, end, rank: {}
    scale: float = 2.0
    shifts: tuple[float, ...] = (1.0,)  # added to the samples in turn
    tolerance: float = 1e-5


def label(start: int, end: int, rank: int) -> dict[str, Any]:
    return {"label": torch.arange(start, end) % 3}


def mixed(start: int, end: int, rank: int) -> dict[str, Any]:
    return {"branch": torch.arange(start, end) % 2}


def one_on_one_rank(start: int, end: int, rank: int) -> dict[str, Any]:
    """Every second sample of the first three is auxiliary: the last ranks have the main branch only."""
    return {"branch": torch.tensor([int(i < 3 and i % 2) for i in range(start, end)], dtype=torch.long)}


def one_for_all(start: int, end: int, rank: int) -> dict[str, Any]:
    return {"branch": "aux"}


def positions(start: int, end: int, rank: int) -> dict[str, Any]:
    """A mask that hides the first sample, and more and less of the others: counts differ on each rank."""
    number = torch.arange(start, end) * 5 % 13
    return {"mask": (torch.arange(12) < number.unsqueeze(1)).reshape(-1, 4, 3)}


CASES: dict[str, Case] = {
    "masked": Case(lambda: normlab.BatchNorm2d(6), along=positions),
    "masked switchable": Case(lambda: normlab.SwitchNorm2d(6), along=positions),
    "masked modes": Case(lambda: normlab.ModeNorm2d(6), along=positions),
    "masked branches": Case(
        lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES), along=lambda *a: positions(*a) | mixed(*a)
    ),
    "batch": Case(lambda: normlab.BatchNorm2d(6)),
    "batch, vectors": Case(lambda: normlab.BatchNorm1d(6), (6,)),
    "batch, untracked": Case(lambda: normlab.BatchNorm2d(6, track_running_stats=False)),
    "batch, cumulative": Case(lambda: normlab.BatchNorm2d(6, momentum=None)),
    "batch, volumes": Case(lambda: normlab.BatchNorm3d(6), (6, 2, 3, 2)),
    "batch, float64": Case(lambda: normlab.BatchNorm2d(6).double(), tolerance=1e-10),
    "batch, far means": Case(lambda: normlab.BatchNorm2d(6), shifts=(1e4, 0, 0, 0, 0, 0, 0, 0), tolerance=1e-3),
    "torch": Case(lambda: nn.BatchNorm2d(6)),
    "switchable": Case(lambda: normlab.SwitchNorm2d(6)),
    "switchable, vectors": Case(lambda: normlab.SwitchNorm1d(6), (6,)),
    "switchable, groups": Case(lambda: normlab.SwitchNorm2d(6, groups=2)),
    "switchable, average": Case(lambda: normlab.SwitchNorm2d(6, moving_average=False)),
    "sparse_switchable": Case(lambda: normlab.SparseSwitchNorm2d(6)),
    "two_pools": Case(lambda: normlab.Norm2d(6, ("batch", "batch_group(4)", "group(3)"))),
    "batch_group": Case(lambda: normlab.BatchGroupNorm2d(6, 3)),
    "batch_group, crossing": Case(lambda: normlab.BatchGroupNorm2d(6, 5)),
    "batch_group, strips": Case(lambda: normlab.BatchGroupNorm2d(6, 12)),
    "batch_channels": Case(lambda: normlab.GhostBatchGroupNorm2d(6, 3)),
    "conditional": Case(lambda: normlab.ConditionalBatchNorm2d(6, 3, init_std=0.2), along=label),
    "sandwich": Case(lambda: normlab.SandwichBatchNorm2d(6, 3, init_std=0.2), along=label),
    "auxiliary, mixed": Case(lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES), along=mixed),
    "auxiliary, one on one rank": Case(lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES), along=one_on_one_rank),
    "auxiliary, one for all": Case(lambda: normlab.AuxiliaryBatchNorm2d(6, BRANCHES), along=one_for_all),
    "sandwich_auxiliary": Case(lambda: normlab.SandwichAuxiliaryBatchNorm2d(6, BRANCHES, init_std=0.2), along=mixed),
    "auxiliary switchable": Case(
        lambda: normlab.Norm2d(6, ("layer", "batch"), "branch", branches=BRANCHES), along=mixed
    ),
    "renorm": Case(lambda: normlab.BatchRenorm2d(6, momentum=0.2, warmup=0, r_steps=2, d_steps=2)),
    "modes": Case(lambda: normlab.ModeNorm2d(6, 3)),
    "modes of branches": Case(lambda: normlab.Norm2d(6, "modes(2)", branches=BRANCHES), along=mixed),
    "own rule": Case(lambda: normlab.Norm2d(6, HalfWay())),
    "predicted": Case(lambda: normlab.Norm2d(6, "batch", "predicted", key_size=2)),
}

# How eight samples are divided.
SPLITS = {2: [(4, 4), (5, 3), (8, 0), (1, 7)], 4: [(3, 2, 2, 1), (2, 0, 5, 1)]}


def data(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, and what its outputs are weighted by in the loss."""
    generator = torch.Generator().manual_seed(step)
    x = case.scale * torch.randn(8, *case.shape, generator=generator)
    x = x + torch.tensor([case.shifts[i % len(case.shifts)] for i in range(8)]).reshape(8, *(1,) * len(case.shape))
    return x, torch.randn(8, *case.shape, generator=generator)


def run_case(case: Case, layer: nn.Module, start: int, end: int, rank: int) -> dict[str, Any]:
    """A few steps on samples ``[start, end)``; the last one also with a penalty on the gradient."""
    seen: dict[str, Any] = {"outputs": [], "gradients": []}
    dtype = next(layer.parameters()).dtype
    for step in range(STEPS):
        x, weight = (t[start:end].to(dtype) for t in data(case, step))
        x.requires_grad_()
        y = layer(x, **case.along(start, end, rank))
        loss = (y * weight).sum()
        if step == STEPS - 1:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().sum()
        loss.backward()
        seen["outputs"].append(y.detach())
        seen["gradients"].append(x.grad)
    seen["parameters"] = {n: p.grad for n, p in layer.named_parameters()}
    seen["buffers"] = dict(layer.named_buffers())
    with torch.no_grad():
        seen["evaluated"] = layer.eval()(data(case, 99)[0][start:end].to(dtype), **case.along(start, end, rank))
    return seen


def make(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


class Network(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), mixture, nn.Flatten(1)
        )
        self.head = nn.LazyLinear(5)
        self(torch.zeros(2, 3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train(
    model: nn.Module, start: int, end: int, factor: float, before: Callable[[nn.Module, int], Any] = lambda *_: None
) -> dict[str, Tensor]:
    """SGD on the mean loss of the whole batch; DDP averages gradients, so each rank's part counts ``factor`` times."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.01)
    for step in range(4):
        before(model, step)
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(8, 3, 6, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator))
        loss = nn.functional.cross_entropy(model(x[start:end]), target[start:end], reduction="sum") / 8 * factor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def network(kind: str = "switchable") -> Network:
    torch.manual_seed(0)
    if kind == "sparse":
        return Network(normlab.SparseSwitchNorm2d(4))
    return Network(normlab.SwitchNorm2d(4, weighting="projection" if kind == "projected" else "softmax"))


def choose(model: nn.Module, step: int) -> None:
    """A mixture becomes one-hot in the middle of the training: a sparse one by its radius, others hardened."""
    if any(isinstance(m, normlab.SparseSwitchNorm) for m in model.modules()):
        normlab.set_radius(model, step / 3)
    elif step == 2:
        normlab.harden(model)


KINDS = ("switchable", "projected", "sparse")


class Separated(nn.Module):
    """Separated layers whose calls have one branch each, with an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(6, 6, 1), nn.ReLU(inplace=True)
        self.first, self.second = (
            normlab.AuxiliaryBatchNorm2d(6, BRANCHES), normlab.SandwichAuxiliaryBatchNorm2d(6, BRANCHES)
        )  # fmt: skip

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.second(self.relu(self.first(self.conv(x), branch)), branch)


# The branch of each step; the last but one is that of the first samples, and the others have the other branch.
STEPS_OF_BRANCHES = ("main", "main", "aux", "both", "main")
UNDER_DDP: dict[str, dict[str, Any]] = {
    "plain": {}, "views": {"gradient_as_bucket_view": True}, "small buckets": {"bucket_cap_mb": 1e-5},
    "unused found": {"find_unused_parameters": True},
}  # fmt: skip


def separated(sizes: tuple[int, ...], rank: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Momentum and weight decay over steps of one branch each: on a rank under DDP, or (None) on one process."""
    torch.manual_seed(0)
    alone = Separated()
    model: nn.Module = alone if rank is None else DistributedDataParallel(sync(alone), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=0.1)
    without = []
    for step, name in enumerate(STEPS_OF_BRANCHES):
        generator = torch.Generator().manual_seed(step)
        x, weight = (torch.randn(8, 6, 4, 3, generator=generator) for _ in range(2))
        parts = list(zip(x.split(list(sizes)), weight.split(list(sizes)), strict=True))
        optimizer.zero_grad()
        mine = range(len(sizes)) if rank is None else [rank]
        if rank is None and name != "both":
            model(x, name).mul(weight).sum().backward()
        elif rank is None:  # each branch is synchronized over the ranks that have it
            for k, branch in enumerate(BRANCHES):
                of = [i for i in mine if i % 2 == k]
                both = [torch.cat([parts[i][j] for i in of]) for j in range(2)]
                model(both[0], branch).mul(both[1]).sum().backward()
        else:
            branch = BRANCHES[rank % 2] if name == "both" else name
            (model(parts[rank][0], branch).mul(parts[rank][1]).sum() * len(sizes)).backward()
        without.append({n.removeprefix("module.") for n, p in model.named_parameters() if p.grad is None})
        optimizer.step()
    return {"without": without, "state": {n: t.clone() for n, t in alone.state_dict().items()}}


class Towers(nn.Module):
    """Every normalizer over the batch in a little network of its own, all of them trained by one step."""

    NAMES = ("batch", "switchable", "sparse_switchable", "two_pools", "batch_group, crossing", "batch_channels",
             "conditional", "sandwich", "auxiliary, mixed", "sandwich_auxiliary", "renorm", "modes", "own rule",
             "predicted")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleDict({name: nn.Conv2d(6, 6, 1) for name in self.NAMES})
        self.norms = nn.ModuleDict({name: CASES[name].make() for name in self.NAMES})
        self.after = nn.ModuleDict({name: nn.Linear(6, 1) for name in self.NAMES})

    def forward(self, x: Tensor, start: int) -> Tensor:  # [N, towers]
        found = []
        for name in self.NAMES:
            y = self.norms[name](self.before[name](x), **CASES[name].along(start, start + len(x), 0))
            found.append(self.after[name](y.relu().mean((2, 3))))
        return torch.cat(found, 1)


def trained_towers(rank: int, ranks: int, sharded: bool) -> tuple[Tensor, dict[str, Any]]:
    """Losses of 50 steps, ``[50, towers]``, and the whole state. Every fifth batch is the smaller end of an epoch."""
    towers = Towers()
    if ranks > 1:
        sync(towers)
    if sharded:
        fully_shard(towers, mesh=init_device_mesh("cpu", (ranks,)))
        parts: Any = list(towers.parameters())
        assert all(p.to_local().numel() < p.numel() for p in parts if len(p) > 1)  # rows are dealt out
    optimizer = torch.optim.SGD(towers.parameters(), 0.05, momentum=0.5, weight_decay=0.01)
    losses = []
    for step in range(50):
        generator, rows = torch.Generator().manual_seed(step), 5 if step % 5 == 4 else 8
        x = 2 * torch.randn(rows, 6, 4, 3, generator=generator) + 1
        target = 2 * x.mean((1, 2, 3)).unsqueeze(1)
        start, end = rows * rank // ranks, rows * (rank + 1) // ranks
        loss = (towers(x[start:end], start) - target[start:end]).square().sum(0) / rows
        optimizer.zero_grad()
        (loss.sum() * (ranks if sharded else 1)).backward()  # fully_shard averages
        if ranks > 1 and not sharded:
            own = [p.grad for p in towers.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in own])
            dist.all_reduce(flat)
            for g, t in zip(own, flat.split([g.numel() for g in own]), strict=True):
                g.copy_(t.view_as(g))
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(total)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(towers, options=whole) if sharded else towers.state_dict()
    return total, dict(state)


def sharded_branches(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a sharded layer whose branches run on different ranks, and of the own layer on the same samples."""
    found = []
    for sharded in (True, False):
        layer: Any = normlab.AuxiliaryBatchNorm2d(6, BRANCHES)
        if sharded:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        x = torch.randn(4, 6, 4, 3, generator=torch.Generator().manual_seed(rank))
        (layer(x, BRANCHES[rank % 2]) * x).sum().backward()
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        found.append({n: g.full_tensor() if sharded else g for n, g in grads.items()})
    return found[0], found[1]


def loaders(ranks: int) -> list[list[Tensor]]:
    """Batches for each rank: of unequal size, unequal number, and none for the last."""
    generator = torch.Generator().manual_seed(0)
    sizes = [[5, 3, 6], [4, 7], [], [2]] if ranks == 4 else [[5, 3, 6], [4]]
    return [[i + torch.randn(n, 6, 4, 3, generator=generator) for i, n in enumerate(s)] for s in sizes]


def accumulated_buffers(parts: list[Tensor], synchronized: bool) -> dict[str, Tensor]:
    """Running statistics of layers after micro-batches that move them once."""
    torch.manual_seed(0)
    made = (
        normlab.BatchNorm2d(6), normlab.SwitchNorm2d(6), normlab.ModeNorm2d(6), normlab.BatchGroupNorm2d(6, 4),
        normlab.AuxiliaryBatchNorm2d(6, BRANCHES), normlab.BatchRenorm2d(6, warmup=0, r_steps=1, d_steps=1),
    )  # fmt: skip
    layers = nn.ModuleList(made)
    if synchronized:
        sync(layers)
    with normlab.accumulated(layers):
        for x in parts:
            for layer in layers:
                wants: Any = layer.wants
                layer(x, *(["aux"] if wants else []))
    return layers.state_dict()


def calibrated(loader: list[Tensor], synchronized: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(normlab.BatchNorm2d(6), nn.ReLU(), normlab.SwitchNorm2d(6), normlab.ModeNorm2d(6))
    if synchronized:
        sync(model)
    normlab.calibrate(model, loader)
    return model.state_dict()


def separated_calibrated(batches: list[tuple[Tensor, str]]) -> dict[str, Tensor]:
    layer = normlab.AuxiliaryBatchNorm2d(6, BRANCHES)
    return normlab.calibrate(layer, batches, forward=lambda m, b: m(b[0], b[1])).state_dict()


def guarded_buffers(bad: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers before and after a batch that is not finite on one rank."""
    layer = normlab.SwitchNorm2d(6)
    sync(layer)
    layer(torch.randn(4, 6, 4, 3))
    before = {n: b.clone() for n, b in layer.named_buffers()}
    with normlab.guarded(layer):
        layer(torch.full((4, 6, 4, 3), float("nan") if bad else 1.0))
    return before, dict(layer.named_buffers())


def work(rank: int, ranks: int, folder: str) -> None:
    """Everything one process does."""
    join(rank, ranks, folder)
    seen: dict[Any, Any] = {}
    for sizes in SPLITS[ranks]:
        start = sum(sizes[:rank])
        for name, case in CASES.items():
            seen[sizes, name] = run_case(case, sync(make(case)), start, start + sizes[rank], rank)
    each = 8 // ranks if rank < ranks - 1 else 8 - 8 // ranks * (ranks - 1)
    start = 8 // ranks * rank
    model = DistributedDataParallel(sync(network()))
    seen["network"] = train(model, start, start + each, float(ranks))
    split = (each,) * ranks if ranks == 2 else SPLITS[4][0]
    seen["separated"] = {name: separated(split, rank, options) for name, options in UNDER_DDP.items()}
    for kind in KINDS:
        model = DistributedDataParallel(sync(network(kind)))
        seen["chosen", kind] = train(model, start, start + each, float(ranks), choose)
    layer = normlab.AuxiliaryBatchNorm2d(6, BRANCHES)
    x = data(CASES["batch"], 0)[0][start : start + each]
    y = sync(layer)(x, BRANCHES[rank % 2]).detach()
    seen["own branch"] = y, {n: b.clone() for n, b in layer.named_buffers()}
    local = unsync(layer)(x, BRANCHES[rank % 2])
    seen["unsync"] = local.detach(), layer.process_group is None, "synchronized" in repr(layer)
    seen["calibrated"] = calibrated(loaders(ranks)[rank], False)
    whole = [data(CASES["batch"], step)[0] for step in range(3)]
    seen["synchronized"] = calibrated([b[start : start + each] for b in whole], True)
    micro = [b[start : start + each] for b in whole]
    seen["accumulated"] = accumulated_buffers(micro, True)
    seen["branches"] = separated_calibrated([(x, BRANCHES[rank % 2])])
    seen["guarded"] = guarded_buffers(rank == 0)
    seen["towers"] = trained_towers(rank, ranks, sharded=ranks == 4)
    seen["sharded branches"] = sharded_branches(rank)
    try:
        normlab.calibrate(normlab.BatchNorm2d(6), [])
    except ValueError as error:
        seen["nothing"] = str(error)
    torch.save(seen, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request, tmp_path_factory) -> list[dict[Any, Any]]:
    """What each process saw."""
    number: int = request.param
    folder = filled_once(tmp_path_factory, f"ranks{number}", lambda folder: run_ranks(work, number, folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(number)]


def alone(case: Case) -> dict[str, Any]:
    return run_case(case, make(case), 0, 8, 0)


def compare(found: Any, expected: Any, what: object, tolerance: float = 1e-5) -> None:
    assert_close(found, expected, rtol=tolerance, atol=10 * tolerance, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_several_processes_compute_what_one_does(ranks, name):
    case = CASES[name]
    one = alone(case)
    for sizes in SPLITS[len(ranks)]:
        parts = [seen[sizes, name] for seen in ranks]
        for what in ("outputs", "gradients"):
            for step in range(STEPS):
                joined = torch.cat([part[what][step] for part in parts])
                compare(joined, one[what][step], (what, sizes), case.tolerance)
        compare(torch.cat([part["evaluated"] for part in parts]), one["evaluated"], sizes, case.tolerance)
        for key, expected in one["parameters"].items():
            found = [g for part in parts if (g := part["parameters"][key]) is not None]
            assert bool(found) == (expected is not None), (key, sizes)
            if found:  # sums over the batch have larger rounding errors
                compare(torch.stack(found).sum(0), expected, (key, sizes), 10 * case.tolerance)
        for part in parts:
            assert part["buffers"].keys() == one["buffers"].keys()
            for key, expected in one["buffers"].items():
                compare(part["buffers"][key], expected, (key, sizes), case.tolerance)


def test_a_network_under_ddp_trains_as_one_process_does(ranks):
    torch.manual_seed(0)
    one = train(network(), 0, 8, 1.0)
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["network"][key], value, rtol=1e-4, atol=1e-5)


def test_fifty_steps_of_every_normalizer(ranks):
    """Losses, statistics and weights of one process; with four by ``fully_shard``, whose whole state loads in one."""
    losses, state = trained_towers(0, 1, False)
    assert bool((losses[-5:].mean(0) < losses[:5].mean(0)).all())
    for seen in ranks if len(ranks) == 2 else ranks[:1]:
        found, theirs = seen["towers"]
        for k, name in enumerate(Towers.NAMES):
            assert_close(found[:, k], losses[:, k], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        Towers().load_state_dict(theirs)
        for key, expected in state.items():
            assert_close(theirs[key], expected, rtol=1e-3, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")


def test_sharded_branches_keep_their_gradients_where_ranks_run_different_ones(ranks):
    for name in (n for seen in ranks[:2] for n in seen["sharded branches"][1]):
        mean = sum(seen["sharded branches"][1].get(name, torch.zeros(6)) for seen in ranks) / len(ranks)
        for seen in ranks:
            assert_close(seen["sharded branches"][0][name], mean)


@pytest.mark.parametrize("name", UNDER_DDP)
def test_separated_layers_under_ddp_train_as_on_one_process(ranks, name):
    """Branches that no process has used keep their values: no gradient of zeros, no weight decay, no momentum."""
    one = separated(SPLITS[len(ranks)][0], None, {})
    assert all(one["without"][k] for k in (0, 1, 2, 4)) and not one["without"][3]
    for seen in ranks:
        assert seen["separated"][name]["without"] == one["without"]
        for key, value in one["state"].items():
            assert_close(seen["separated"][name]["state"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_become_one_hot_under_ddp(ranks, kind):
    """DDP waits for the gradient of each parameter that it was given."""
    model = network(kind)
    one = train(model, 0, 8, 1.0, choose)
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["chosen", kind][key], value, rtol=1e-4, atol=1e-5)
    model.load_state_dict(ranks[0]["chosen", kind])
    weights = torch.tensor(list(normlab.importance(model)["body.4"].values()))
    assert weights.amax(0).tolist() == [1, 1] and weights.sum().item() == 2


def test_ranks_with_different_branches_do_not_mix_them(ranks):
    x = data(CASES["batch"], 0)[0]
    split = x.split([len(seen["own branch"][0]) for seen in ranks])
    for i, name in enumerate(BRANCHES):
        mine = [rank for rank in range(len(ranks)) if rank % 2 == i]
        alone = nn.BatchNorm2d(6)
        expected = alone(torch.cat([split[rank] for rank in mine])).detach()
        compare(torch.cat([ranks[rank]["own branch"][0] for rank in mine]), expected, name)
        for seen in ranks:
            assert_close(seen["own branch"][1]["running_mean"][i], alone.running_mean)
            assert_close(seen["own branch"][1]["running_var"][i], alone.running_var)
            assert seen["own branch"][1]["num_batches_tracked"].tolist() == [1, 1]


def test_unsync_goes_back_to_each_process_alone(ranks):
    x = data(CASES["batch"], 0)[0]
    for part, seen in zip(x.split([len(s["unsync"][0]) for s in ranks]), ranks, strict=True):
        y, none, said = seen["unsync"]
        assert_close(y, nn.BatchNorm2d(6)(part).detach())
        assert none
        assert not said


def test_calibration_is_the_same_on_every_rank_and_as_on_one(ranks):
    one = calibrated([b for loader in loaders(len(ranks)) for b in loader], False)
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["calibrated"][key], value, rtol=1e-5, atol=1e-5)
            assert torch.equal(seen["calibrated"][key], ranks[0]["calibrated"][key])


def test_synchronized_layers_are_calibrated_on_the_union_of_each_batch(ranks):
    one = calibrated([data(CASES["batch"], step)[0] for step in range(3)], False)
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["synchronized"][key], value, rtol=1e-5, atol=1e-5)


def test_synchronized_micro_batches_move_statistics_once(ranks):
    whole = torch.cat([data(CASES["batch"], step)[0] for step in range(3)])
    one = accumulated_buffers([whole], False)
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["accumulated"][key], value, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_calibration_of_branches_that_one_rank_does_not_see(ranks):
    x = data(CASES["batch"], 0)[0]
    split = x.split([len(seen["own branch"][0]) for seen in ranks])
    one = separated_calibrated([(part, BRANCHES[rank % 2]) for rank, part in enumerate(split)])
    for seen in ranks:
        for key, value in one.items():
            assert_close(seen["branches"][key], value, rtol=1e-5, atol=1e-5)


def test_the_guard_refuses_on_every_rank_what_is_bad_on_one(ranks):
    for seen in ranks:
        before, after = seen["guarded"]
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_empty_loaders_are_refused_on_every_rank(ranks):
    assert all("gave no batch" in seen["nothing"] for seen in ranks)


# Errors, and one process.


def test_torch_distributed_must_be_initialized():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group first"):
        sync(normlab.BatchNorm2d(6))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (normlab.BatchNorm2d(6, ghost=2), r"BatchNorm2d .*batch/ghost=2.*build it without ghost"),
        (normlab.SwitchNorm2d(6, ghost=2), r"SwitchNorm2d .*ghost=2.*without ghost"),
        (normlab.KalmanNorm2d(6), "KalmanNorm2d predicts from local samples"),
        (nn.Sequential(nn.Conv2d(6, 6, 1), normlab.GroupNorm2d(2, 6)), "Sequential has no .*over the batch"),
    ],
    ids=["ghost", "ghost in a mixture", "kalman", "nothing over the batch"],
)
def test_what_cannot_be_synchronized(one_process, model, said):
    with pytest.raises(ValueError, match=said):
        sync(model)
    assert all(m.process_group is None for m in model.modules() if isinstance(m, normlab.Norm))


def test_one_process_is_no_change_and_says_that_it_is_synchronized(one_process):
    for name in ("batch", "switchable", "modes", "auxiliary, mixed"):
        case = CASES[name]
        layer = sync(make(case))
        assert "synchronized" in repr(layer)
        together, apart = run_case(case, layer, 0, 8, 0), alone(case)
        for a, b in zip(together["gradients"], apart["gradients"], strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-4)
        assert "synchronized" not in repr(unsync(layer))


def test_a_copy_is_synchronized_with_the_same_processes_and_a_file_with_none(one_process):
    model: Any = sync(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)))
    assert copy.deepcopy(model)[1].process_group is copy.copy(model[1]).process_group is dist.group.WORLD
    assert pickle.loads(pickle.dumps(model))[1].process_group is None
    x = torch.randn(4, 3, 5, 5)
    assert_close(normlab.fold(model, inputs=x)(x), model.eval()(x))


def test_the_environment_is_clean():
    """Nothing above may leave a process group or its variables to the tests that follow."""
    assert not dist.is_initialized()
    assert "MASTER_ADDR" not in os.environ
