"""A process that decodes image files, started by :mod:`normlab.lab.stored`: it imports nothing of this package.

Each line of stdin is JSON: files, and the height and width to bring them to. The answer on stdout is the number of
bytes that follow, or minus that of an error's text, as eight bytes; then the images as bytes [N, H, W, 3].
"""

import json
import signal
import sys


def square(path: str, size: int) -> bytes:
    """The middle of a picture, its shorter side scaled to ``size``, in colour."""
    from PIL import Image

    with Image.open(path) as opened:
        if opened.mode[0] in "IF":  # more than 8 bits a pixel, which a conversion would clip at 255
            raise ValueError(f"it has more than 8 bits a pixel (mode {opened.mode}); scale such images to 8 bits")
        # A large JPEG is decoded at a half, a quarter or an eighth, if that is at least twice the size.
        opened.draft("RGB", (2 * size, 2 * size))
        picture = opened.convert("RGB")
    wide, high = picture.size
    if (wide, high) != (size, size):
        side = min(wide, high)
        left, top = (wide - side) // 2, (high - side) // 2
        box = (left, top, left + side, top + side)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return picture.tobytes()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it; without the parent, stdin ends
    out = sys.stdout.buffer
    for line in sys.stdin:
        asked = json.loads(line)
        content, path = b"", ""
        try:
            for path in asked["files"]:
                content += square(path, asked["size"])
            length = len(content)
        except Exception as error:  # PIL raises half a dozen kinds for damaged files
            content = f"{path} cannot be read as an image: {error}".encode()
            length = -len(content)
        out.write(length.to_bytes(8, "little", signed=True) + content)
        out.flush()


if __name__ == "__main__":
    main()
