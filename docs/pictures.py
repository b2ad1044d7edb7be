"""The pictures of the normalizers, drawn from the layers themselves whenever the documentation is built.

Each page includes ``generated/NAME.md``: its picture, with the picture's own words as the text alternative. The front
page includes ``generated/menu.md``: all pictures, small and linked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import normlab


def _chosen() -> normlab.Norm:
    """A sparse mixture that has let go of one pool."""
    layer = normlab.SparseSwitchNorm2d(6)
    for name, logits in (("mean_weight", (0.1, 0.5, 0.7)), ("var_weight", (0.1, 0.6, 0.7))):
        getattr(layer, name).data.copy_(torch.tensor(logits))
    layer.set_radius(0.6)
    return layer


# By the name of a page: its title on the front page, and the layers that it shows.
PICTURES: dict[str, tuple[str, list[normlab.Norm]]] = {
    "batch": ("Batch", [normlab.BatchNorm2d(6)]),
    "instance": ("Instance", [normlab.InstanceNorm2d(6, affine=True)]),
    "layer": ("Layer", [normlab.LayerNorm2d(6)]),
    "group": ("Group", [normlab.GroupNorm2d(3, 6)]),
    "positional": ("Positional", [normlab.PositionalNorm2d(6)]),
    "batch-group": ("Batch group", [normlab.BatchGroupNorm2d(6, 3), normlab.BatchGroupNorm2d(7, 5)]),
    "ghost": ("Ghost batches", [normlab.BatchNorm2d(6, ghost=2), normlab.GhostBatchGroupNorm2d(6, 3, ghost=2)]),
    "switchable": ("Switchable", [normlab.SwitchNorm2d(6)]),
    "sparse-switchable": ("Sparse switchable", [_chosen()]),
    "mode": ("Mode", [normlab.ModeNorm2d(6)]),
    "batch-renorm": ("Batch renorm", [normlab.BatchRenorm2d(6)]),
    "kalman": ("Kalman", [normlab.KalmanNorm2d(6)]),
    "conditional": ("Conditional batch", [normlab.ConditionalBatchNorm2d(6, num_classes=10)]),
    "sandwich": ("Sandwich batch", [normlab.SandwichBatchNorm2d(6, num_classes=10)]),
    "auxiliary": ("Separated batch", [normlab.AuxiliaryBatchNorm2d(6, branches=("main", "aux"))]),
    "sandwich-auxiliary": (
        "Sandwich auxiliary",
        [normlab.SandwichAuxiliaryBatchNorm2d(6, branches=("clean", "adversarial"))],
    ),
    "conditional-instance": ("Conditional instance", [normlab.ConditionalInstanceNorm2d(6, num_classes=5)]),
    "adaptive-instance": (
        "Adaptive instance",
        [normlab.AdaptiveInstanceNorm2d(6), normlab.SandwichAdaptiveInstanceNorm2d(6)],
    ),
    "meta": ("Meta", [normlab.InstanceLevelMetaNorm2d(6, key_size=3)]),
}


for _entry in normlab.NORMALIZERS.values():  # what the registry knows besides
    if _entry.statistics is not None and _entry.layer is None and _entry.page:
        _title, _layers = PICTURES.setdefault(_entry.page, (_entry.row.capitalize(), []))
        _layers.append(normlab.Norm(6, _entry.name))


def write_pictures(app: Any) -> None:
    """A handler of sphinx's ``builder-inited``."""
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    menu = ['<div class="menu">']
    for page, (title, layers) in PICTURES.items():
        lines = []
        for k, layer in enumerate(layers):
            name = f"{page}-{k + 1}.svg"
            drawing = normlab.draw(layer)
            drawing.save(folder / name)
            lines.append(f"![{drawing.text}](../generated/{name})")
        (folder / f"{page}.md").write_text("\n".join(lines) + "\n")
        normlab.draw(layers[0], labels=False).save(folder / f"{page}-small.svg")
        menu.append(f"[![](generated/{page}-small.svg)<br>{title}](normalizers/{page}.md)")
    (folder / "menu.md").write_text("\n\n".join([*menu, "</div>"]) + "\n")
