"""A photograph as the network wants to see it: what is cut out to test on is what
`gradfilter train` looks at."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from gradfilter_device.exported import reason

CENTRE = 7 / 8  # share of a photograph's short side that is looked at
SMALL = 64  # pixels a side; of such pictures all is looked at
NOTHING = -100  # a label that has no part in the loss
LARGE = 2**22  # pixels whose memory is worth giving back
ORIENTATION = 0x0112  # where EXIF says how the camera was held
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
QUARTERS = {TURNS[n] for n in (5, 6, 7, 8)}  # after which width and height have changed places


class Broken(Exception):
    """A picture that cannot be read."""


@dataclass(frozen=True)
class Photo:
    """A picture, upright and in RGB; transparent parts are white.

    `image` may have fewer pixels than the file, whose `size` is upright and `stored` as it is
    there; `turn` made it upright.
    """

    image: Image.Image
    size: tuple[int, int]
    stored: tuple[int, int]
    turn: Image.Transpose | None
    large: bool  # whether reading it took much memory

    def part(self, box: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray:
        """A part, given in pixels of the file, as bytes [3, H, W] of a size."""
        sides = zip(box, self.image.size * 2, self.size * 2, strict=True)
        held = tuple(edge * own / whole for edge, own, whole in sides)
        resized = self.image.resize(size[::-1], Image.Resampling.BILINEAR, box=held)
        return np.asarray(resized).transpose(2, 0, 1)


def least(size: tuple[int, int], share: float) -> int:
    """Pixels a side of which such a share is twice what the network takes."""
    return math.ceil(2 * max(size) / share)


def picture(path: Path, side: int | None = None) -> Photo:
    """The picture in a file.

    A JPEG is decoded at a half, a quarter or an eighth of its size where `side` pixels a side are
    left: in a fraction of the time and memory. Made small for the network it then is not the same
    as by `gradfilter train`, but nearly: of 255 mostly within 2, at the hardest edges within 16.
    """
    with _opened(path) as image:
        whole = image.size
        taken = _taken(image, side)
        smaller = image.size != whole
        image.load()
        turn = TURNS.get(image.getexif().get(ORIENTATION))
        found = rgb(image)
        if turn is not None:
            found = found.transpose(turn)
        size = (whole[::-1] if turn in QUARTERS else whole) if smaller else found.size
        return Photo(found, size, whole, turn, taken > LARGE)


def pixels(path: Path, side: int | None) -> int:
    """How many pixels `picture` takes memory for, by the head of the file; 0 if it is broken."""
    try:
        with _opened(path) as image:
            return _taken(image, side)
    except Broken:
        return 0


def _taken(image: Image.Image, side: int | None) -> int:
    """Ask for a JPEG of so many pixels a side at least; the pixels that take memory."""
    whole = image.size
    if side is not None:
        image.draft("RGB", (side, side))
    # a progressive one is held whole until it is made smaller
    return math.prod(whole if image.info.get("progressive") else image.size)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """A picture file; whatever goes wrong with it says that it is broken."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("not a regular file")  # to open a pipe would wait for ever
        with Image.open(path) as image:
            yield image
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise Broken(f"{path}: not a picture of a known kind") from error
    except Exception as error:  # every decoder of Pillow has exceptions of its own
        raise Broken(f"{path}: {reason(error)}") from error


def rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # more than 8 bits of grey, which convert() would clip to 8
        grey = np.asarray(image)
        if image.mode != "I" or grey.max() > 255:  # "I" may hold bytes: those stay as they are
            grey = grey >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its pixels are fractions of unknown range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def is_small(photo: Photo, size: tuple[int, int]) -> bool:
    """Whether all of a photograph is looked at."""
    return max(photo.size) <= max(SMALL, max(size) // 2)


def seen(masks: bool) -> float:
    """The share of a side that `cut` leaves at least."""
    return 1 if masks else CENTRE


def cut(photo: Photo, size: tuple[int, int], all_of_it: bool) -> np.ndarray:
    """The middle of a photograph, or all of it, as bytes [3, H, W] of that size."""
    width, height = photo.size
    if all_of_it:
        return photo.part((0, 0, width, height), size)
    share = 1 if is_small(photo, size) else CENTRE
    side = max(1, round(share * min(height, width)))
    left, top = (width - side) // 2, (height - side) // 2
    return photo.part((left, top, left + side, top + side), size)


def mask(
    path: Path, photo: Photo, size: tuple[int, int], classes: int, ignore: int | None
) -> np.ndarray:
    """The classes of a picture's mask file [H, W]; what is ignored has no part in the loss."""
    with _opened(path) as image:
        mode = image.mode
        upright = _upright(image, photo)
        stored = np.asarray(upright.resize(size[::-1], Image.Resampling.NEAREST))
    if mode not in ("L", "P", "1"):
        raise Broken(f"{path}: a mask has one byte per pixel, its class; this one is {mode}")
    found = stored.astype(np.int64)
    if ignore is not None:
        found[found == ignore] = NOTHING
    if found.max() >= classes:
        raise Broken(f"{path}: label {found.max()} is none of {classes} classes")
    return found


def _upright(mask: Image.Image, photo: Photo) -> Image.Image:
    """A mask turned as its picture was, unless it has the form of the upright picture already."""
    if mask.size == photo.stored:
        return mask if photo.turn is None else mask.transpose(photo.turn)
    if mask.size == photo.size:
        return mask
    told = ["x".join(map(str, pixels)) for pixels in (mask.size, photo.size)]
    raise ValueError("a mask of {} pixels for a picture of {}".format(*told))
