"""The archives of the homes, in small: which images are of which split, and their labels."""

import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from experiments.engine.data import catalog, raw
from experiments.engine.data import papers as papers_module
from experiments.engine.errors import EngineError


def image(level, kind="JPEG", mode="RGB"):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (level, level, level)).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def pets(folder):
    write_tar(folder / "images.tar.gz", {f"images/cat_{i}.jpg": image(i) for i in (1, 2, 3)})
    lists = {
        "annotations/trainval.txt": b"#Image CLASS-ID\ncat_1 1 1 1\ncat_3 37 1 12\n",
        "annotations/test.txt": b"cat_2 5 2 4\n",
    }
    write_tar(folder / "annotations.tar.gz", lists)
    return {"train": {1: 0, 3: 36}, "test": {2: 4}}


def flowers(folder):
    write_tar(folder / "102flowers.tgz", {f"jpg/image_{i:05d}.jpg": image(i) for i in range(1, 6)})
    savemat(folder / "imagelabels.mat", {"labels": np.array([[102, 3, 1, 7, 9]])})
    savemat(folder / "setid.mat", {"trnid": [[2, 1]], "valid": [[5]], "tstid": [[3, 4]]})
    return {"train": {1: 101, 2: 2}, "test": {3: 0, 4: 6}}


def food(folder):
    files = {f"food-101/images/{name}.jpg": image(i) for i, name in ((1, "pie/7"), (2, "soup/7"), (3, "soup/9"))}
    lists = {"classes": b"pie\nsoup\n", "train": b"soup/7\npie/7\n", "test": b"soup/9\n"}
    write_tar(folder / "food-101.tar.gz", files | {f"food-101/meta/{name}.txt": data for name, data in lists.items()})
    return {"train": {1: 0, 2: 1}, "test": {3: 1}}


def tiny(folder):
    top = "tiny-imagenet-200"
    with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr(f"{top}/wnids.txt", "n2\nn1\n")
        archive.writestr(f"{top}/train/n1/images/n1_0.JPEG", image(1))
        archive.writestr(f"{top}/train/n2/images/n2_0.JPEG", image(2, mode="L"))
        archive.writestr(f"{top}/val/images/val_0.JPEG", image(3))
        archive.writestr(f"{top}/val/val_annotations.txt", "val_0.JPEG\tn2\t0\t0\t62\t57\n")
        archive.writestr(f"{top}/test/images/test_0.JPEG", image(4))
    return {"train": {1: 0, 2: 1}, "test": {3: 1}}


@pytest.mark.parametrize(
    ("name", "write"), [("oxford_pets", pets), ("flowers102", flowers), ("food101", food), ("tiny_imagenet", tiny)]
)
def test_published_archives(name, write, tmp_path):
    """Every image is of one grey, by which it is known."""
    wanted = write(tmp_path)
    data_set = catalog.find(name)
    form = data_set.forms[-1]
    for split, labels in wanted.items():
        found = {}
        for _, example in raw.examples(data_set, form, tmp_path, split):
            decoded = np.asarray(Image.open(example["image"]))
            assert decoded.shape == (5, 6, 3)
            found[int(decoded[0, 0, 0])] = example["label"]
        assert found == labels


def test_papers_by_the_names_of_their_classes(tmp_path):
    rows = {"train": [("cs.CV", "seen"), ("math.ST", "counted")], "val": [("math.AC", "even")], "test": []}
    for name, papers in rows.items():
        lines = [json.dumps({"text": text, "label": label}) for label, text in papers]
        (tmp_path / f"{name}_data.txt").write_text("\n".join([*lines, ""]))
    data_set = catalog.find("arxiv11")
    form = data_set.forms[-1]
    found = {split: [e for _, e in raw.examples(data_set, form, tmp_path, split)] for split in data_set.splits}
    assert {split: [(e["label"], e["text"]) for e in examples] for split, examples in found.items()} == {
        "train": [(1, "seen"), (10, "counted")],
        "valid": [(0, "even")],
        "test": [],
    }
    assert len(raw.ARXIV_CLASSES) == papers_module.NUM_CLASSES == 11
    (tmp_path / "test_data.txt").write_text('{"text": "a", "label": "cs.LG"}')
    with pytest.raises(EngineError, match=r"a raw file of arxiv11 in .* is damaged"):
        list(raw.examples(data_set, form, tmp_path, "test"))


def test_the_text_of_wikitext(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", f" = {split} = \n")
    data_set = catalog.find("wikitext2")
    for split in data_set.splits:
        ((_, example),) = raw.examples(data_set, data_set.forms[-1], tmp_path, split)
        assert example["text"] == f" = {split} = \n"


def test_an_archive_without_all_its_images(tmp_path):
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {"images/cat_1.jpg": image(1)})
    data_set = catalog.find("oxford_pets")
    with pytest.raises(
        EngineError, match=r"is damaged \(images.tar.gz has 1 of 2 images\); remove it, and get it again from"
    ):
        list(raw.examples(data_set, data_set.forms[-1], tmp_path, "train"))
