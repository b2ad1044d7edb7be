"""A process that decodes image files, started by :mod:`normlab.lab.stored`: it imports nothing of this package.

Each line of stdin is JSON: files, the height and width to bring them to, the share of the shorter side that is kept,
and a seed for each random crop, or null. The answer on stdout is the number of
bytes that follow, or minus that of an error's text, as eight bytes; then the images as bytes [N, H, W, 3].
"""

import json
import math
import random
import signal
import sys


def square(path: str, size: int, share: float, seed: int | None) -> bytes:
    """The middle of a picture as a square, in colour: ``share`` of its shorter side, scaled to ``size``.

    With a seed it is a random crop instead, by "Going Deeper with Convolutions": of 0.08 to all of the picture's area,
    and of a ratio between 3/4 and 4/3.
    """
    from PIL import Image

    with Image.open(path) as opened:
        if opened.mode[0] in "IF":  # more than 8 bits a pixel, which a conversion would clip at 255
            raise ValueError(f"it has more than 8 bits a pixel (mode {opened.mode}); scale such images to 8 bits")
        wide, high = opened.size
        part = drawn(wide, high, seed) if seed is not None else None
        across, down = part[2:] if part else (share * min(wide, high),) * 2
        # A large JPEG is decoded at a half, a quarter or an eighth, if what is kept then has at least twice the size.
        opened.draft("RGB", (int(2 * size * wide / across), int(2 * size * high / down)))
        picture = opened.convert("RGB")
    if part:
        x, y = picture.width / wide, picture.height / high
        box = (part[0] * x, part[1] * y, (part[0] + across) * x, (part[1] + down) * y)
        return picture.resize((size, size), Image.Resampling.BILINEAR, box=box).tobytes()
    wide, high = picture.size
    if (wide, high) != (size, size) or share < 1:
        side = min(wide, high)
        left, top, edge = (wide - side) // 2, (high - side) // 2, side * (1 - share) / 2
        box = (left + edge, top + edge, left + side - edge, top + side - edge)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return picture.tobytes()


def drawn(wide: int, high: int, seed: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random crop."""
    draw = random.Random(seed)
    for _ in range(10):
        area, ratio = wide * high * draw.uniform(0.08, 1), math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= wide and 0 < down <= high:
            return draw.randint(0, wide - across), draw.randint(0, high - down), across, down
    # Few crops fit into a picture so long: its middle, as far as the ratios allow.
    across, down = min(wide, round(high * 4 / 3)), min(high, round(wide * 4 / 3))
    return (wide - across) // 2, (high - down) // 2, across, down


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it; without the parent, stdin ends
    out = sys.stdout.buffer
    for line in sys.stdin:
        asked = json.loads(line)
        content, path = b"", ""
        try:
            for path, seed in zip(asked["files"], asked["seeds"], strict=True):
                content += square(path, asked["size"], asked["share"], seed)
            length = len(content)
        except Exception as error:  # PIL raises half a dozen kinds for damaged files
            content = f"{path} cannot be read as an image: {error}".encode()
            length = -len(content)
        out.write(length.to_bytes(8, "little", signed=True) + content)
        out.flush()


if __name__ == "__main__":
    main()
