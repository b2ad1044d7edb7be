"""Heat maps and sample images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ..measurements import MEASUREMENTS
from ..measurements import title_of as measured_title
from .records import branch_of, collect, given_to, title_of
from .view import Config, HeatMap, Made, Samples

__all__ = ["heat_maps", "made", "mean_grid", "samples"]

WHO = ("branch", "mix", "of", "branches")  # arguments that say which of a model's branches is measured


def heat_maps(configs: Sequence[Config]) -> list[HeatMap]:
    """One for each measurement. The maps of several branches stand side by side, on one scale."""
    groups: dict[str, dict[str, dict[str, list[Mapping[str, Any]]]]] = {}
    for name, by in collect(configs, "grid").items():
        first = next(iter(by.values()))[0]
        rest = {k: v for k, v in given_to(first).items() if k not in WHO}
        # Without arguments, only the name tells maps apart.
        alone = name if first.get("arguments") is None else ""
        groups.setdefault(repr((first.get("kind", name), alone, first.get("n"), rest)), {})[name] = by
    maps = []
    for group in groups.values():
        several = len(group) > 1
        title = next(title_of(name, by) for name, by in group.items())
        grids = {
            f"{label}, {branch_of(found[0])}" if several else label: mean_grid([r["grid"]["values"] for r in found])
            for label in dict.fromkeys(label for by in group.values() for label in by)
            for found in (by[label] for by in group.values() if label in by)
        }  # fmt: skip
        first = next(iter(next(iter(group.values())).values()))[0]
        if several and first.get("kind") in MEASUREMENTS:  # the title names no branch
            title = measured_title(first["kind"], {k: v for k, v in given_to(first).items() if k not in WHO})
        x_label, y_label = (first["grid"].get(k, "") for k in ("x_label", "y_label"))
        maps.append(HeatMap(title, x_label, y_label, grids))
    return maps


def mean_grid(grids: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[sum(v) / len(v) for v in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]


def samples(configs: Sequence[Config]) -> list[Samples]:
    shown = []
    for name, by in collect(configs, "samples").items():
        first = next(iter(by.values()))[0]["samples"]
        after = {}
        for label, found in by.items():
            s = found[0]["samples"]
            pictures = png(s["after"], s["shape"])
            after[label] = list(zip(pictures, map(str, s["before_class"]), map(str, s["after_class"]), strict=True))
        before = png(first["before"], first["shape"])
        title = str(first.get("title") or title_of(name, by))
        if any(s.title == title for s in shown):  # another branch under the same corruption
            title = f"{title}, {branch_of(next(iter(by.values()))[0])}"
        shown.append(Samples(title, before, [str(c) for c in first["label"]], after))
    return shown


def made(configs: Sequence[Config]) -> list[Made]:
    """The pictures of records, by their titles."""
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for config in configs:
        for record in config.runs[0].records if config.runs else ():
            for picture in record.get("pictures") or ():
                name = str(picture["title"])
                several = f"{name}, {record['measurement']}" if config.label in found.get(name, {}) else name
                found.setdefault(several, {})[config.label] = addresses(picture)
    return [Made(title, rows) for title, rows in found.items()]


def addresses(picture: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A picture as images of a page. A drawing in an img element runs no script. Texts have no address."""
    captions = list(picture.get("captions") or ())
    files = [("png", data) for data in png(picture["images"], picture["shape"])] if picture.get("images") else []
    files += [("svg+xml", picture["svg"].encode())] if picture.get("svg") else []
    captions += [""] * (len(files) - len(captions))
    images = [(f"data:image/{kind};base64,{base64.b64encode(data).decode()}", str(said))
              for (kind, data), said in zip(files, captions, strict=False)]  # fmt: skip
    return images + [("", str(text)) for text in picture.get("texts") or ()]


def png(encoded: str, shape: Sequence[int]) -> list[bytes]:
    """The images [k, C, H, W] of a base64 string of bytes, each as a PNG file."""
    import numpy as np
    from PIL import Image  # comes with matplotlib

    images = np.frombuffer(base64.b64decode(encoded), np.uint8).reshape(shape)
    files = []
    for image in images:
        buffer = io.BytesIO()
        pixels = image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)
        Image.fromarray(pixels).save(buffer, "png", optimize=True)
        files.append(buffer.getvalue())
    return files
