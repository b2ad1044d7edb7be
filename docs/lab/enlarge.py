"""A task of its own in one file: enlarge images twofold. Digits of 28x28 pixels are halved and restored."""

import torch
from torch import nn
from torch.nn import functional as F

from normlab import lab
from normlab.lab.norms import parse_norm
from normlab.lab.tasks import Batch, Metric, Picture, Task
from normlab.lab.tasks.files import outputs, read_image, write_image
from normlab.lab.tasks.measuring import Measure


class Enlarger(nn.Module):
    """The bilinear enlargement, and what three convolutions add to it. Takes images of any size."""

    def __init__(self, channels, width, norm):
        super().__init__()
        self.details = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), norm.make(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), norm.make(width), nn.ReLU(),
            nn.Conv2d(width, 4 * channels, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def forward(self, x):  # [N, C, H, W] to [N, C, 2H, 2W]
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False) + self.details(x)


def errors(model, pairs):
    """Of each image: the root of the mean square, in grey levels of 0 to 255."""
    found = [(model(p.x).clamp(0, 1) - p.y).square().flatten(1).mean(1).sqrt() for p in pairs]
    return 255 * torch.cat(found)


@torch.no_grad()
def noisy(model, ctx, std):
    """A measurement: the error where noise was added to the small images."""
    noise = torch.Generator(ctx.device).manual_seed(0)
    pairs = map(halved, ctx.batches())
    changed = (p.with_(x=p.x + std * torch.randn(p.x.shape, generator=noise, device=ctx.device)) for p in pairs)
    return {"error": errors(model, changed).mean().item()}


def halved(batch):
    """Small images and the large ones that they were made of, as pixels."""
    y = batch.x.float() / 255 if batch.x.dtype == torch.uint8 else batch.x
    return Batch(x=F.avg_pool2d(y, 2), y=y)


class Enlarge(Task):
    about = "enlarge images of digits twofold"
    samples = "images"
    minutes = 1
    defaults = {
        "data": "mnist5k", "train_size": 2000, "test_size": 500, "width": 16, "epochs": 4, "batch_size": 32,
        "optimizer": "adam", "lr": 3e-3, "weight_decay": 0.0, "best": "test",
    }  # fmt: skip
    axes = {"norm": ("none", "batch", "instance"), "seed": (0, 1)}
    metrics = {"error": Metric("grey levels", higher=False), "psnr": Metric("dB", title="PSNR")}
    measured = ("test", "noise(0.1)")
    measurements = {"noise": Measure("the error on noisy images", noisy, {"std": 0.05}, {"error": metrics["error"]})}

    def load(self, settings, *, root=None, download=False):
        data = lab.load(settings.data, root=root, download=download, size=settings.size or None)
        return data.subset(settings.train_size or None, settings.test_size or None)

    def build(self, settings, like):
        return Enlarger(like.channels, settings.width, parse_norm(settings.norm))

    def prepare(self, batch, ctx, generator):
        return halved(batch)

    def step(self, model, batch, ctx):
        return {"loss": F.mse_loss(model(batch.x), batch.y)}

    @torch.no_grad()
    def evaluate(self, model, ctx):
        found = errors(model, map(halved, ctx.batches()))
        psnr = 20 * (255 / found.clamp_min(1e-3)).log10()
        return {"error": found.mean().item(), "psnr": psnr.mean().item()}

    @torch.no_grad()
    def pictures(self, model, ctx):
        pair = halved(next(ctx.batches(size=5)))
        rows = F.interpolate(pair.x, scale_factor=2), model(pair.x).clamp(0, 1), pair.y
        said = [f"{what} {k}" for what in ("small", "enlarged", "original") for k in range(1, 6)]
        return [Picture("The first test images", torch.cat(rows), said)]

    @torch.no_grad()
    def apply(self, model, files, out, ctx, options):
        written = []
        for file, path in outputs(files, out, ".png"):
            image = read_image(file, ctx.data.channels).to(ctx.device)
            written.append(write_image(path, model(image[None] / 255)[0]))
        return written
