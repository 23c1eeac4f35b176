"""EncodedImage: an image as the bytes of its file, and what may be one. Without torch, as processes of agents are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from hybridflow.errors import PromptError

MOST_PIXELS = 1 << 26
"""Of one image: more take minutes and gigabytes, and are scaled down anyway."""
_WIDE = ("I", "F")  # modes of numbers of any range


class EncodedImage(bytes):
    """The bytes of an image's file, as the column `images` has them."""

    @classmethod
    def of(cls, where: str, image: Any, most_pixels: int) -> EncodedImage:
        """An image of PIL, or the bytes of a file that is whole. Errors: PromptError."""
        if isinstance(image, bytes | bytearray):
            with explained(where, image):
                opened = Image.open(BytesIO(image))
                check_pixels(where, opened, most_pixels)
                opened.load()
            return cls(image)
        if not isinstance(image, Image.Image):
            kind = type(image).__name__
            raise PromptError(f"{where} is a {kind}: give an image of PIL, or the bytes of an image's file.")
        check_pixels(where, image, most_pixels)
        return cls(as_png(where, image))

    @property
    def name(self) -> str:
        """Equal for equal bytes."""
        return hashlib.blake2b(self, digest_size=16).hexdigest()

    def open(self) -> Image.Image:
        """`shown`. Errors: those of PIL."""
        return shown(Image.open(BytesIO(self)))


def shown(image: Image.Image) -> Image.Image:
    """In RGB, turned as the file says, what is transparent on white, of 16 bits of grey the upper ones."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def as_png(where: str, image: Image.Image) -> bytes:
    """The bytes of its file. Errors: PromptError."""
    with explained(where, image):
        shown(image).save(made := BytesIO(), "PNG", compress_level=1)
    return made.getvalue()


def check_pixels(where: str, image: Image.Image, most: int) -> tuple[int, int]:
    """Its width and height. Errors: PromptError for more than `most` pixels, and for a mode without a known range."""
    width, height = image.size
    if image.mode in _WIDE:
        raise PromptError(f"{where} has mode {image.mode!r}, whose range is not known. Give 8 or 16 bits.")
    if width * height > most:
        raise PromptError(
            f"{where} has {width} x {height} pixels, and max_image_pixels={most}. Scale it down, or raise the limit."
        )
    return width, height


@contextmanager
def explained(where: str, image: Any) -> Iterator[None]:
    """Errors: PromptError for those of files and of PIL."""
    try:
        yield
    except PromptError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        named = f" {image}" if isinstance(image, str | os.PathLike) else ""
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise PromptError(f"{where}{named} cannot be read: {why}.") from None
