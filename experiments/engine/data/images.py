"""Images: augmented in training, cut from the middle in evaluation, normalised."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from PIL import Image

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FASHION = ((0.2860,), (0.3530,))
RESIZE = 256 / 224  # of the short side before the centre is cut
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of random crops

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
    """A random view of an image, (size, size, channels) uint8.

    Args:
      image: (height, width, channels) uint8.
      size: of the view.
      kind: "resized_crop", a random part of the image at random proportions; "padded_crop", the image moved by up to
        `padding` pixels.
      rng: of the view.
      area: share of the image that a resized crop keeps.
      padding: of a padded crop.
      flip: whether left and right change places in half of all cases.
    """
    view = _resized_crop(image, size, area, rng) if kind == "resized_crop" else _padded_crop(image, size, padding, rng)
    return view[:, ::-1] if flip and rng.random() < 0.5 else view


def evaluation_image(image: np.ndarray, size: int, kind: Augmentation) -> np.ndarray:
    """The middle of an image, resized so that it is a little larger; the whole where no crops are resized."""
    height, width = image.shape[:2]
    if kind == "padded_crop":
        return image if (height, width) == (size, size) else _resize(image, (0, 0, width, height), size, size)
    scale = round(RESIZE * size) / min(height, width)
    new_height, new_width = max(size, round(scale * height)), max(size, round(scale * width))
    resized = _resize(image, (0, 0, width, height), new_height, new_width)
    top, left = (new_height - size) // 2, (new_width - size) // 2
    return resized[top : top + size, left : left + size]


def normalize(images: np.ndarray) -> np.ndarray:
    """uint8 -> float32 with mean 0 and deviation 1: of ImageNet for colours, of Fashion-MNIST for grey."""
    mean, deviation = (np.array(x, np.float32) for x in (IMAGENET if images.shape[-1] == 3 else FASHION))
    return (images.astype(np.float32) / np.float32(255) - mean) / deviation


def _resized_crop(
    image: np.ndarray, size: int, area: tuple[float, float], rng: np.random.Generator, tries: int = 10
) -> np.ndarray:
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
    image = evaluation_image(image, size, "padded_crop")
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = rng.integers(2 * padding + 1, size=2)
    return padded[top : top + size, left : left + size]


def _resize(image: np.ndarray, box: tuple[int, int, int, int], height: int, width: int) -> np.ndarray:
    """The part of an image within (left, top, right, bottom), resized."""
    squeezed = image[..., 0] if image.shape[-1] == 1 else image
    resized = np.asarray(
        Image.fromarray(squeezed).resize((width, height), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    )
    return resized.reshape(height, width, image.shape[-1])
