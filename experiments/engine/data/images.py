"""Views of images: random ones for training, the centre for evaluation, and normalisation."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from PIL import Image

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FASHION = ((0.2860,), (0.3530,))
RESIZE = 256 / 224  # length of the short side before the centre is cut out, relative to the size of the view
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges of the area and of the aspect ratio of random crops

Augmentation = Literal["resized_crop", "padded_crop"]


def training_image(
    image: np.ndarray,
    size: int,
    kind: Augmentation,
    rng: np.random.Generator,
    *,
    area: tuple[float, float] = AREA,
    padding: int = 4,
    flip: bool = True,
) -> np.ndarray:
    """Returns a random view of an image, (size, size, channels) uint8.

    Args:
      image: Image, (height, width, channels) uint8.
      size: Height and width of the view.
      kind: "resized_crop" takes a random part of the image with a random aspect ratio. "padded_crop" moves the image by
        up to `padding` pixels.
      rng: Random generator.
      area: Range of the share of the image that a resized crop keeps.
      padding: Number of pixels by which a padded crop moves the image at most.
      flip: Whether half of the views are mirrored.
    """
    view = _resized_crop(image, size, area, rng) if kind == "resized_crop" else _padded_crop(image, size, padding, rng)
    return view[:, ::-1] if flip and rng.random() < 0.5 else view


def evaluation_image(image: np.ndarray, size: int, kind: Augmentation) -> np.ndarray:
    """Returns the centre of the resized image, or the whole resized image for "padded_crop"."""
    height, width = image.shape[:2]
    if kind == "padded_crop":
        return image if (height, width) == (size, size) else _resize(image, (0, 0, width, height), size, size)
    scale = round(RESIZE * size) / min(height, width)
    new_height, new_width = max(size, round(scale * height)), max(size, round(scale * width))
    resized = _resize(image, (0, 0, width, height), new_height, new_width)
    top, left = (new_height - size) // 2, (new_width - size) // 2
    return resized[top : top + size, left : left + size]


def normalize(images: np.ndarray) -> np.ndarray:
    """Returns uint8 images as float32, scaled by the statistics of ImageNet (colour) or Fashion-MNIST (grey)."""
    mean, deviation = (np.array(x, np.float32) for x in (IMAGENET if images.shape[-1] == 3 else FASHION))
    return (images.astype(np.float32) / np.float32(255) - mean) / deviation


def _resized_crop(
    image: np.ndarray, size: int, area: tuple[float, float], rng: np.random.Generator, tries: int = 10
) -> np.ndarray:
    """Returns a random part of an image, resized; the largest central square if no random part fits."""
    height, width = image.shape[:2]
    for _ in range(tries):
        share = rng.uniform(*area) * height * width
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(share * ratio)), round(math.sqrt(share / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return _resize(image, (left, top, left + w, top + h), size, size)
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return _resize(image, (left, top, left + side, top + side), size, size)


def _padded_crop(image: np.ndarray, size: int, padding: int, rng: np.random.Generator) -> np.ndarray:
    """Returns an image that is moved by up to `padding` pixels, with zeros where it has left."""
    image = evaluation_image(image, size, "padded_crop")
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = rng.integers(2 * padding + 1, size=2)
    return padded[top : top + size, left : left + size]


def _resize(image: np.ndarray, box: tuple[int, int, int, int], height: int, width: int) -> np.ndarray:
    """Returns the part of an image within a box (left, top, right, bottom), resized."""
    squeezed = image[..., 0] if image.shape[-1] == 1 else image
    resized = np.asarray(
        Image.fromarray(squeezed).resize((width, height), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    )
    return resized.reshape(height, width, image.shape[-1])
