"""Analyses against values worked out by hand, theory against simulation."""

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import normlab
from normlab.lab import analysis
from normlab.lab.analysis import affine
from normlab.lab.errors import LabError
from normlab.lab.tasks.parts import importance_pictures


def two_norms(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), make(4), nn.ReLU(), nn.Conv2d(4, 6, 3), make(6))


def test_importance_by_layer():
    model = two_norms(normlab.SwitchNorm2d)
    with torch.no_grad():  # softmax of (ln 2, 0, 0) is (1/2, 1/4, 1/4)
        model[1].mean_weight.copy_(torch.tensor([math.log(2), 0, 0]))  # type: ignore[union-attr]
    first, second = analysis.importance(model)
    assert (first.layer, first.depth, second.layer, second.depth) == ("1", 1, "4", 2)
    assert list(first.mean.values()) == pytest.approx([1 / 2, 1 / 4, 1 / 4])
    assert list(first.var.values()) == pytest.approx([1 / 3] * 3)
    means, variances = analysis.average_importance([first, second])
    assert list(means.values()) == pytest.approx([5 / 12, 7 / 24, 7 / 24])
    assert sum(variances.values()) == pytest.approx(1)
    assert analysis.importance(two_norms(normlab.BatchNorm2d)) == []
    branches = normlab.Norm2d(4, ("instance", "batch"), "branch", branches=("main", "aux"))
    assert normlab.importance(nn.Sequential(branches)) == {"0": {"instance": (0.5, 0.5), "batch": (0.5, 0.5)}}


def test_importance_by_part_of_a_model_and_of_its_log():
    model = nn.Sequential(OrderedDict(body=two_norms(normlab.SwitchNorm2d), head=two_norms(normlab.SwitchNorm2d)))
    with torch.no_grad():
        for weight in (model.body[1].mean_weight, model.body[4].mean_weight, model.head[4].var_weight):  # type: ignore[union-attr]
            weight.copy_(torch.tensor([math.log(2), 0, 0]))  # (1/2, 1/4, 1/4)
    parts = {"backbone": r"^body\.", "head, first": r"^head\.1", "mask head": "mask"}
    found = analysis.importance_by_part(model, parts)
    assert list(found) == ["backbone", "head, first", "other"]
    assert list(found["backbone"][0].values()) == pytest.approx([1 / 2, 1 / 4, 1 / 4])
    assert list(found["backbone"][1].values()) == pytest.approx([1 / 3] * 3)
    assert list(found["other"][1].values()) == pytest.approx([1 / 2, 1 / 4, 1 / 4])
    logged = json.loads(json.dumps(normlab.importance(model)))
    assert analysis.importance_by_part(logged, parts) == found
    (picture,) = importance_pictures(model, parts)
    assert all(title in picture.svg for title in found) and "mask head" not in picture.svg
    assert importance_pictures(two_norms(nn.BatchNorm2d), parts) == []


def test_capv_is_of_the_mean_of_the_product():
    layer = normlab.SandwichBatchNorm2d(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 3.0]))  # type: ignore[union-attr]
        layer.class_weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    (found,) = analysis.capv(nn.Sequential(layer))
    product = torch.tensor([0.5, 1.5, 2.0])  # channel means of shared * class
    assert found.effective == pytest.approx(product.var(correction=0).item())
    assert found.independent == pytest.approx(torch.tensor([0.5, 0.5, 1.0]).var(correction=0).item())
    assert found.shared == 2
    # The product of the means would be twice the independent part, so this sees which one is taken.
    assert found.effective != pytest.approx(4 * found.independent)


def test_capv_of_branches_and_of_one_index():
    layer = normlab.AuxiliaryBatchNorm2d(4, branches=("clean", "adversarial"))
    with torch.no_grad():
        layer.branch_weight["adversarial"].fill_(3.0)
    (found,) = analysis.capv(layer)
    assert (found.effective, found.indices, found.shared) == (1.0, 2, None)
    assert analysis.capv(normlab.ConditionalBatchNorm2d(4, 1)) == []
    assert analysis.capv(two_norms(nn.BatchNorm2d)) == []


@pytest.mark.parametrize("name", ["ConditionalBatchNorm2d", "SandwichBatchNorm2d"])
def test_capv_by_depth_of_classes_with_and_without_a_shared_scale(name):
    """Rows of a generator: every layer with classes by its place among all norm layers, the last plain one in none."""
    make = getattr(normlab, name)
    model = nn.Sequential(make(2, 2), nn.ReLU(), nn.BatchNorm2d(2), make(2, 2), normlab.BatchNorm2d(2))
    tables = torch.tensor([[[1.0, 2.0], [3.0, 5.0]], [[0.0, 1.0], [2.0, 0.0]]])
    shared = torch.tensor([[2.0, 1.0], [-1.0, 3.0]])
    with torch.no_grad():
        layers: Any = (model[0], model[3])
        for layer, table, scale in zip(layers, tables, shared, strict=True):
            layer.class_weight.copy_(table)
            if layer.weight is not None:
                layer.weight.copy_(scale)
    rows = analysis.capv(model)
    assert [(r.layer, r.depth, r.indices) for r in rows] == [("0", 1, 2), ("3", 3, 2)]
    assert [r.independent for r in rows] == pytest.approx([(4 - 1.5) ** 2 / 4, (1 - 0.5) ** 2 / 4])
    if name == "SandwichBatchNorm2d":
        assert [r.effective for r in rows] == pytest.approx([((6 + 5) / 2 - 2) ** 2 / 4, (-1 - 1.5) ** 2 / 4])
        assert [r.shared for r in rows] == [1.5, 1.0]
    else:
        assert [(r.effective, r.shared) for r in rows] == [(r.independent, None) for r in rows]


def test_capv_of_a_sandwich_of_branches():
    layer = normlab.SandwichAuxiliaryBatchNorm2d(2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([2.0, 4.0]))  # type: ignore[union-attr]
        layer.branch_weight["aux"].copy_(torch.tensor([1.0, 3.0]))
    (found,) = analysis.capv(layer)
    assert (found.effective, found.independent, found.shared) == (4.0, 0.25, 3.0)  # means 3 and 7, 1 and 2


@pytest.mark.parametrize("make", [nn.BatchNorm2d, normlab.BatchNorm2d])
def test_effective_affine_read_and_measured_agree(make):
    model = two_norms(make)
    norm: Any = model[1]
    x = 3 * torch.randn(16, 3, 9, 9, generator=torch.Generator().manual_seed(1)) + 1
    model(x)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    read = analysis.effective_affine(model)
    expected = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    assert read[0].mean == pytest.approx(expected.abs().mean().item())
    assert read[0].smallest == pytest.approx(expected.abs().min().item())
    assert read[0].largest == pytest.approx(expected.abs().max().item())
    slopes = affine._slopes(model, x)
    assert slopes["1"][0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert slopes["1"][1].mean().item() == pytest.approx(read[0].shift, rel=1e-4)
    assert model.training


def test_effective_affine_of_layers_without_running_statistics():
    model = two_norms(lambda c: nn.GroupNorm(1, c))
    (first, _) = analysis.effective_affine(model)
    assert first.mean is None and "give inputs" in first.source
    x = torch.randn(64, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    (first, _) = analysis.effective_affine(model, x)
    h = model[0](x)
    assert first.mean == pytest.approx(1 / h.std().item(), rel=0.05)  # one scale for all channels of a sample


@pytest.mark.parametrize(
    ("activation", "batch_size", "rate"),
    [("relu", 8, 1.788), ("relu", 16, 1.590), ("relu", 64, 1.493), ("linear", 8, 1.2), ("linear", 5, 1.5)],
)
def test_explosion_rate_formula_and_simulation(activation, batch_size, rate):
    assert analysis.explosion_rate(batch_size, activation) == pytest.approx(rate, abs=5e-4)
    found = analysis.gradient_explosion(batch_size, depth=32, width=256, activation=activation, seeds=2)
    # Width 256: log norms of single nets scatter by about 0.02 a layer around mean-field theory.
    assert found.rate == pytest.approx(rate, rel=0.03)
    assert len(found.norms) == 32 and found.norms[0] > found.norms[-1] == 1


def test_explosion_rate_limits():
    assert analysis.explosion_rate(10**9) == pytest.approx(analysis.explosion_rate(math.inf), rel=1e-6)
    assert analysis.explosion_rate(math.inf) == pytest.approx(1.467, abs=5e-4)
    limits = [analysis.depth_limit(b) for b in (5, 8, 16, math.inf)]
    assert limits == pytest.approx([19.5, 27.5, 34.5, 41.8], abs=0.05)
    with pytest.raises(LabError, match="more than 3"):
        analysis.explosion_rate(3)
    with pytest.raises(LabError, match="gelu"):
        analysis.explosion_rate(8, "gelu")


def test_pca_matches_sklearn():
    from sklearn.decomposition import PCA

    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 8)
    found = analysis.pca(x, 3)
    sk = PCA(3, svd_solver="full").fit(x.numpy())
    assert found.share == pytest.approx(sk.explained_variance_ratio_.tolist())
    assert torch.allclose(found.points.abs(), torch.as_tensor(sk.transform(x.numpy())).abs())
    with pytest.raises(LabError, match="no 9 principal"):
        analysis.pca(x, 9)


def test_representations_keep_batches_apart_and_buffers_untouched():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5))
    model.eval()
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batches = [x, x + 100]  # batch statistics take the offset away; running ones do not
    points, member = analysis.representations(model, batches, ["0"], training=True)["0"]
    assert member == [0] * 8 + [1] * 8
    assert torch.allclose(points.points[:8], points.points[8:], atol=1e-3)
    points, _ = analysis.representations(model, batches, ["0"])["0"]
    assert (points.points[8:] - points.points[:8]).norm(dim=1).min() > 100
    assert not model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(LabError, match="no layer 'bn'"):
        analysis.activations(model, x, ["bn"])


def test_describe_shows_what_a_model_has():
    text = analysis.describe(two_norms(normlab.SwitchNorm2d), torch.randn(4, 3, 9, 9))
    assert "2 normalization layers" in text and "Importance weights" in text and "0.3333" in text
    assert "measured on 4 samples" in text and "CAPV" not in text
    text = analysis.describe(normlab.SandwichBatchNorm2d(2, 3))
    assert "CAPV" in text and "(itself)" in text
    assert analysis.describe(nn.Linear(2, 2)) == "Linear has no normalization layer."
