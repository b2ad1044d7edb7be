"""What the tables and figures share: settings, augmentations, and the trainings by name."""

from __future__ import annotations

from typing import Any

from ...settings import Settings
from ..base import Context
from ..grid import settings_for

__all__ = ["augmentation", "base", "case_of", "note"]

# RandAugment's numbers of operations and magnitudes are those of its own paper for these networks.
_RANDAUGMENT = {
    ("cifar10", "wrn-28-2"): "randaugment(n=3, m=4)", ("cifar10", "wrn-28-10"): "randaugment(n=3, m=5)",
    ("cifar100", "wrn-28-2"): "randaugment(n=1, m=2)", ("cifar100", "wrn-28-10"): "randaugment(n=2, m=14)",
}  # fmt: skip
FULL = ("cifar10", "wrn-28-2")
SMALL = ("mnist5k", "small")
# AdvProp's attack: of size 4 in grey levels, in five steps of one. "PGD with N = 4" leaves open whether that is the
# size or the number of steps.
ATTACK = "eps=4/255, units=pixels, steps=5, step=1/255"
ATTACK_SMALL = "eps=0.1, units=pixels, steps=4, step=0.04"


def augmentation(name: str, setting: tuple[str, str] = FULL) -> str:
    """An augmentation of the paper as text. All but none and flip mirror and crop; RandAugment cuts out too."""
    small = setting == SMALL
    return {
        "none": "identity",
        "flip": "flip",
        "flip+crop": "standard",
        "standard": "standard",
        "cutout": "cutout(size=8)" if small else "cutout(size=16)",
        "augmix": "augmix",
        "gaussian": "gaussian(std=0.2)",
        "randaugment": _RANDAUGMENT.get(setting, "randaugment(n=2, m=4, cutout=8)"),
        "autoaugment": "autoaugment(cutout=8)" if small else "autoaugment",
    }[name]


def base(ctx: Context) -> Settings:
    """The settings of WRN-28-2 on CIFAR-10, or a small net on digits."""
    full = {
        "model": "wrn-28-2", "data": "cifar10", "epochs": 200, "batch_size": 128, "lr": 0.1, "nesterov": True,
        "weight_decay": 5e-4, "decay_all": False, "precision": "bf16", "channels_last": True,
    }  # fmt: skip
    small = {
        "model": "small", "data": "mnist5k", "epochs": 6, "batch_size": 64, "lr": 0.05, "train_size": 2000,
    }  # fmt: skip
    tiny = {**small, "epochs": 1, "train_size": 96, "test_size": 32}
    return settings_for(ctx, **ctx.pick(default=small, full=full, smoke=tiny))


def setting_of(ctx: Context) -> tuple[str, str]:
    return FULL if ctx.scale == "full" else SMALL


def case_of(main: str, aux: str = "", setting: tuple[str, str] = FULL, norm: str = "") -> dict[str, Any]:
    """Settings of a training: one augmentation, or two streams; ``norm`` batch sends both through one."""
    if main == "adversarial":
        return {"norm": "batch", "recipe": f"adversarial({ATTACK_SMALL if setting == SMALL else ATTACK})"}
    if not aux:
        return {"norm": "batch", "recipe": f"augmented({augmentation(main, setting)})"}
    attack = ATTACK_SMALL if setting == SMALL else ATTACK
    second = f"pgd({attack})" if aux == "adversarial" else augmentation(aux, setting)
    streams = f"main={augmentation(main, setting)}, aux={second}"
    if norm == "batch":
        return {"norm": "batch", "recipe": f"streams({streams}, separated=false, forward=one)"}
    return {"norm": norm or "auxiliary", "recipe": f"streams({streams}, forward=one)"}


def note(ctx: Context, full: str) -> str:
    if ctx.scale == "full":
        return (
            f"{full} 200 epochs, batches of 128 (two streams: 256 images), learning rate 0.1 with cosine decay, "
            "Nesterov momentum, weight decay 5e-4 on convolutions and the linear layer; the paper does not say which "
            "parameters decay. Convolutions in bfloat16."
        )
    return (
        "Default scale: four convolutions on 2,000 digits of mnist5k, 6 epochs, in place of WRN-28-2 on CIFAR-10. "
        "Digits are neither mirrored nor cropped, Cutout is 8 pixels wide, RandAugment has 2 operations. What can be "
        "compared is at most the direction; --full runs the paper's setting."
    )
