"""ImageProcessor: the images of prompts as patches that a vision-language model reads, and their tokens.

Shapes: k images, n patches of all of them, P numbers of a patch.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from hybridflow.batch.ragged import Ragged
from hybridflow.data.encoded_image import MOST_PIXELS, EncodedImage, as_png, check_pixels, explained
from hybridflow.data.tokenizer import Tokenizer, is_image
from hybridflow.errors import ConfigError, PromptError
from hybridflow.models.images import GRIDS, PIXELS, VISION_FAMILIES, ImageTokens

_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""How files end that are whole; one that does not is decoded to find out."""
_DIGESTED = 1 << 14  # bytes
_THUMBNAIL = 96  # pixels of the longer side
_PROCESSORS = "of a model that reads images: " + ", ".join(VISION_FAMILIES)


def thumbnail(image: EncodedImage) -> str:
    """A small copy as a `data:` address, for pages."""
    small = image.open()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(made := BytesIO(), "JPEG")
    return f"data:image/jpeg;base64,{b64encode(made.getvalue()).decode()}"


class Patches(NamedTuple):
    """The images of rows: `pixels` ragged [n, P] float32, `grids` ragged [k, 3] int64."""

    pixels: Ragged
    grids: Ragged


class ImageProcessor:
    """transformers' image processor `raw` of a model, with the model's tokenizer; relative paths begin at `folder`.

    A prompt has one token `token` for each image, which becomes as many as the model reads: one for `merge` x `merge`
    patches of `patch` numbers. `settings` is what decides the patches of an image, plain data.
    """

    def __init__(self, raw: Any, tokenizer: Tokenizer, most_pixels: int = MOST_PIXELS, folder: Path = Path()) -> None:
        self.raw, self.most_pixels, self.folder = raw, most_pixels, folder
        self.tokenizer = Tokenizer(tokenizer.raw, tokenizer.end_ids, tokenizer.template, images=True)
        self.text = getattr(tokenizer.raw, "image_token", "<|image_pad|>")
        self.token = tokenizer.raw.convert_tokens_to_ids(self.text)
        if self.token is None or self.token == tokenizer.raw.unk_token_id:
            raise ConfigError(f"processor=: its tokenizer has no token {self.text!r}. Give one {_PROCESSORS}.")
        self.merge, self.patch = int(raw.merge_size), 3 * raw.temporal_patch_size * raw.patch_size**2
        told = {name: value for name, value in raw.to_dict().items() if name != "image_processor_type"}
        self.settings: dict[str, Any] = json.loads(json.dumps(told, sort_keys=True, default=str))

    def check_model(self, tokens: ImageTokens, model: str) -> None:
        """Errors: PromptError unless the model reads the patches that this processor makes."""
        found = {"token": self.token, "merge": self.merge, "patch": self.patch}
        needed = {name: getattr(tokens, name) for name in found}
        if found == needed:
            try:
                own = ImageProcessor(load_image_processor(model), self.tokenizer).settings
            except ConfigError:
                return  # a model without files of a processor
            found, needed = ({k: v for k, v in some.items() if k != "size"} for some in (self.settings, own))
        what = f"PromptLoader(processor=) is of another model than {model}"
        check_same(found, needed, what, "the model's", f"Give processor={model!r}")

    def check(self, place: str, prompt: Any, images: Any) -> tuple[int, list[tuple[int, int, str]]]:
        """Tokens that the images add to the prompt, and their (width, height, digest), without decoding files that look
        whole.

        Errors: PromptError for a file that is missing, broken or too large, and unless the prompt has a place for
        each image.
        """
        sizes = [self._size(f"{place}: image {at}", one) for at, one in enumerate(listed(images))]
        texts = [prompt] if isinstance(prompt, str) else [one.get("content") for one in prompt]
        parts = [part for text in texts for part in ([text] if isinstance(text, str) else text or ())]
        places = sum(is_image(one) for one in parts)
        places += sum(str(one.get("text") if isinstance(one, Mapping) else one).count(self.text) for one in parts)
        if places != len(sizes):
            raise PromptError(
                f"{place} has {len(sizes)} images and its messages {places} parts {{'type': 'image'}}: give one each."
            )
        return sum(self._tokens(f"{place}: image {at}", size) - 1 for at, size in enumerate(sizes)), sizes

    def read(self, place: str, images: Any) -> list[EncodedImage]:
        """The images of a row as the bytes of their files. Errors: PromptError."""
        found = list[EncodedImage]()
        for at, one in enumerate(listed(images)):
            with self._opened(where := f"{place}: image {at}", one) as file, explained(where, one):
                found.append(EncodedImage(file.read()))
        return found

    def patches(self, places: Sequence[str], rows: Sequence[Sequence[EncodedImage]]) -> Patches:
        """The images of rows. Errors: PromptError for one that cannot be decoded."""
        pixels, grids, counts = [torch.empty(0, self.patch)], [torch.empty(0, 3, dtype=torch.int64)], list[int]()
        for place, images in zip(places, rows, strict=True):
            before = len(pixels)
            for at, one in enumerate(images):
                with explained(f"{place}: image {at}", one):
                    made = self.raw(images=[one.open()], return_tensors="pt")
                pixels.append(made[PIXELS].float())
                grids.append(made[GRIDS].long())
            counts.append(sum(map(len, pixels[before:])))
        own = [len(images) for images in rows]
        return Patches(Ragged.from_lengths(torch.cat(pixels), counts), Ragged.from_lengths(torch.cat(grids), own))

    def expanded(self, place: str, ids: Sequence[int], grids: Tensor) -> list[int]:
        """The token ids with as many tokens for each image as it has. Errors: PromptError unless it has one each."""
        if (places := ids.count(self.token)) != len(grids):
            raise PromptError(f"{place} has {len(grids)} images and {places} tokens {self.text!r}: give one each.")
        return ImageTokens(self.token, (), self.merge, self.patch).expanded(ids, grids)

    def _opened(self, where: str, image: Any) -> BinaryIO:
        if isinstance(image, Mapping):  # as datasets and their Parquet files have one
            image = image.get("bytes") or image.get("path")
        if isinstance(image, Image.Image):
            return BytesIO(as_png(where, image))
        if isinstance(image, bytes | bytearray):
            return BytesIO(image)
        if not isinstance(image, str | os.PathLike):
            kind = type(image).__name__
            raise PromptError(f"{where} is a {kind}: give a path, the bytes of an image's file, or an image of PIL.")
        with explained(where, image):
            return (self.folder / Path(image).expanduser()).open("rb")

    def _size(self, where: str, image: Any) -> tuple[int, int, str]:
        """Width, height, and a digest of the file: its length and `_DIGESTED` bytes at both ends, where these do not
        show that it is whole, all of it; none of an image of PIL."""
        if isinstance(image, Image.Image):
            return *check_pixels(where, image, self.most_pixels), ""
        with self._opened(where, image) as file, explained(where, image):
            found = Image.open(file)
            size, ending = check_pixels(where, found, self.most_pixels), _ENDS.get(found.format or "")
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _DIGESTED))
            last = file.read()
            whole = ending is not None and last.endswith(ending)
            file.seek(0)
            first = file.read(_DIGESTED if whole else -1)
            if not whole:
                Image.open(BytesIO(first)).load()
        return *size, hashlib.blake2b(b"%d " % length + first + last, digest_size=16).hexdigest()

    def _tokens(self, where: str, size: tuple[int, int, str]) -> int:
        with explained(where, "it"):
            return self.raw.get_number_of_image_patches(size[1], size[0]) // self.merge**2


def check_same(own: Mapping[str, Any], other: Mapping[str, Any], what: str, whose: str, remedy: str) -> None:
    """Errors: PromptError for a setting of a processor that `whose` settings `other` have otherwise."""
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            raise PromptError(f"{what}: it has {name}={own.get(name)!r}, {whose} {other.get(name)!r}. {remedy}.")


def load_image_processor(directory: str | os.PathLike[str]) -> Any:
    """transformers' image processor of a directory or of a name on the Hugging Face Hub, which needs Pillow only.

    Errors: ConfigError without one.
    """
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(os.fspath(directory), backend="pil", trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        why = str(error).split("\n", 1)[0].rstrip(".")
        raise ConfigError(f"processor={os.fspath(directory)!r} has no image processor: {why}.") from None
    return found


def image_processor(given: Any, tokenizer: Tokenizer | None, most_pixels: int, folder: Path) -> ImageProcessor:
    """That of a directory or hub name, a processor of transformers, or its image processor.

    Errors: ConfigError for anything else, and for one without images or without a `tokenizer`.
    """
    named = isinstance(given, str | os.PathLike)
    raw = load_image_processor(given) if named else getattr(given, "image_processor", given)
    if any(not hasattr(raw, name) for name in ("merge_size", "patch_size", "get_number_of_image_patches")):
        raise ConfigError(f"processor= is a {type(raw).__name__}: give one {_PROCESSORS}.")
    if tokenizer is None:
        raise ConfigError(f"processor= is a {type(raw).__name__} alone: give tokenizer= as well.")
    return ImageProcessor(raw, tokenizer, most_pixels, folder)


def listed(images: Any) -> list[Any]:
    """The images of a row: several, one, or None."""
    return [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
