"""Views of images: their sizes, what they keep, and their scale."""

import numpy as np
import pytest

from experiments.engine.data.examples import ImageData
from experiments.engine.data.images import FASHION, IMAGENET, evaluation_image, normalize, training_image
from experiments.engine.errors import EngineError
from tests.experiments.engine.data.raw_sets import write_pack


@pytest.mark.parametrize("shape", [(40, 60, 3), (61, 33, 3), (28, 28, 1)])
@pytest.mark.parametrize("kind", ["resized_crop", "padded_crop"])
def test_views_have_the_size_and_come_from_the_image(shape, kind):
    image = np.random.default_rng(0).integers(100, 200, size=shape, dtype=np.uint8)
    rng = np.random.default_rng(1)
    views = [training_image(image, 28, kind, rng) for _ in range(10)]
    for view in [*views, evaluation_image(image, 28, kind)]:
        assert view.shape == (28, 28, shape[-1])
        assert view.dtype == np.uint8
        inside = view[view > 0] if kind == "padded_crop" else view
        assert inside.min() >= 90
        assert inside.max() <= 210
    assert len({view.tobytes() for view in views}) > 5
    np.testing.assert_array_equal(
        training_image(image, 28, kind, np.random.default_rng(7)),
        training_image(image, 28, kind, np.random.default_rng(7)),
    )


def test_a_resized_crop_keeps_a_part_of_the_image():
    """Of an image that grows brighter to the right: a part of its levels, from all over it; and all in evaluation."""
    image = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    rng = np.random.default_rng(0)
    views = [training_image(image, 28, "resized_crop", rng, area=(0.1, 0.1)).astype(int) for _ in range(50)]
    widths = [int(np.ptp(view)) for view in views]
    assert 40 < min(widths) < max(widths) < 85  # sqrt(0.1) of 200 is 63, and sides differ by up to 4 / 3
    assert min(view.min() for view in views) < 20
    assert max(view.max() for view in views) > 180
    assert np.ptp(evaluation_image(image, 28, "resized_crop").astype(int)) > 150


def test_a_padded_crop_moves_the_image_by_up_to_four_pixels():
    image = np.zeros((28, 28, 1), np.uint8)
    image[14, 14] = 255
    places = set()
    for seed in range(400):
        rows, columns, _ = np.nonzero(training_image(image, 28, "padded_crop", np.random.default_rng(seed)))
        places.add((int(rows[0]), int(columns[0])))
    assert {row for row, _ in places} == set(range(10, 19))
    assert {column for _, column in places} == set(range(9, 19))  # 14 is 13 where it is flipped


def test_an_image_that_is_neither_moved_nor_flipped_is_itself():
    image = np.random.default_rng(0).integers(256, size=(28, 28, 1), dtype=np.uint8)
    rng = np.random.default_rng(1)
    for _ in range(10):
        np.testing.assert_array_equal(training_image(image, 28, "padded_crop", rng, padding=0, flip=False), image)


def test_the_middle_is_kept_in_evaluation():
    image = np.zeros((64, 128, 3), np.uint8)
    image[:, 48:80] = 200
    view = evaluation_image(image, 32, "resized_crop")
    assert view[:, 16].min() > 190
    assert view[:, 0].max() < 10
    assert evaluation_image(image, 32, "padded_crop").shape == (32, 32, 3)


def test_normalised_images():
    for mean, deviation in (IMAGENET, FASHION):
        level = np.round(255 * np.array(mean)).astype(np.uint8)
        images = np.broadcast_to(level, (2, 4, 4, len(mean)))
        out = normalize(images)
        assert out.dtype == np.float32
        assert np.abs(out).max() < 0.02
        brighter = normalize(np.minimum(images + np.uint8(51), 255).astype(np.uint8))
        np.testing.assert_allclose((brighter - out)[0, 0, 0], 0.2 / np.array(deviation), rtol=1e-4)


def test_image_data(tmp_path):
    write_pack(tmp_path, "food101", count=16)
    data = ImageData("food101", 2, size=16, patch_size=4, data_dir=str(tmp_path))
    assert data.length == 16
    assert (data.count("train"), data.count("test")) == (12, 4)
    inputs, labels = data.training(0, 12, 0, np.random.default_rng(0))
    assert inputs.shape == (12, *data.example.shape)
    assert sorted(labels) == sorted([0] * 8 + [1] * 4)
    seen = data.read("test", np.arange(4))[0]
    np.testing.assert_array_equal(data.read("test", np.arange(4))[0], seen)
    bright = inputs.mean(axis=(1, 2, 3))
    assert bright[labels == 1].min() > bright[labels == 0].max()
    with pytest.raises(EngineError, match="food101 has the label 1, and the model 1 classes"):
        ImageData("food101", 1, size=16, patch_size=4, data_dir=str(tmp_path)).read("train", np.arange(12))
    with pytest.raises(ValueError, match=r"ImageData.size is 10; it must be a multiple of patch_size = 4"):
        ImageData("food101", 2, size=10, patch_size=4)
