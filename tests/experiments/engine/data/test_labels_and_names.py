"""Labels outside the classes, and names in archives: twice, of links, or absolute."""

import gzip
import io
import stat
import tarfile
import zipfile

import numpy as np
import pytest
from scipy.io import savemat

from tests.experiments.engine.data.raw_sets import (
    unpublished,  # noqa: F401
    write_arxiv,
    write_fashion,
    write_imdb,
    write_pack,
)
from tests.experiments.engine.data.refusals import (
    change_pack,
    fresh,  # noqa: F401
    refused,
    refused_archive,
)
from tests.experiments.engine.data.test_archives import flowers, food, image, pets, tiny, write_tar

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")


@pytest.mark.parametrize("label", [10**6, -7, 37, -1])
def test_labels_of_a_pack_outside_the_classes(tmp_path, label):
    write_pack(tmp_path, "oxford_pets")
    labels = np.zeros(8, np.int64)
    labels[2] = label
    path = tmp_path / "oxford_pets/oxford_pets.npz"
    change_pack(path, label=labels, classes=np.array([f"class{index}" for index in range(37)]))
    wanted = rf"the label of 2/image2 in oxford_pets.npz is {label}, and must be an integer from 0 to 36"
    refused(wanted, "oxford_pets", tmp_path)
    with np.load(path) as pack:
        arrays = dict(pack)
    del arrays["classes"]
    np.savez(path, **arrays)
    wanted = rf"the label of 2/image2 in the train split is {label}, and must be an integer from 0 to 36"
    refused(wanted, "oxford_pets", tmp_path)


def test_labels_of_a_pack_with_fewer_classes_than_the_set(tmp_path):
    write_pack(tmp_path, "food101")
    change_pack(tmp_path / "food101/food10.npz", label=np.full(8, 2))
    refused(r"the label of 0/image0 in food10.npz is 2, and must be an integer from 0 to 1", "food101", tmp_path)


def test_labels_of_idx_files_outside_the_classes(tmp_path):
    write_fashion(tmp_path)
    path = tmp_path / "fashion_mnist/train-labels-idx1-ubyte.gz"
    data = bytearray(gzip.decompress(path.read_bytes()))
    data[8 + 3] = 10
    path.write_bytes(gzip.compress(data))
    refused(
        r"the label of 00003 in the train split is 10, and must be an integer from 0 to 9", "fashion_mnist", tmp_path
    )


@pytest.mark.parametrize(("label", "shown"), [(-7, "-7"), (11, "11"), (0.7, "0.7"), (True, "True"), ("3", "'3'")])
def test_labels_of_papers_outside_the_classes(tmp_path, label, shown):
    write_arxiv(tmp_path, {"train": [(0, "a"), (label, "b")], "valid": [(0, "c")], "test": [(0, "d")]})
    wanted = rf"the label of line 2 of train.jsonl.xz is {shown}, and must be an integer from 0 to 10"
    refused(wanted, "arxiv11", tmp_path)


@pytest.mark.parametrize("label", [0, 38])
def test_labels_of_published_pets_outside_the_classes(tmp_path, label):
    pets(tmp_path)
    write_tar(tmp_path / "annotations.tar.gz", {"annotations/trainval.txt": f"cat_1 {label} 1 1\n".encode()})
    wanted = rf"the label of images/cat_1.jpg in the train split is {label - 1}, and must be an integer from 0 to 36"
    refused_archive(wanted, "oxford_pets", tmp_path)


@pytest.mark.parametrize("index", [0, 6, -1])
def test_flowers_that_do_not_exist(tmp_path, index):
    """The image 0 does not get the class of the last one."""
    flowers(tmp_path)
    savemat(tmp_path / "setid.mat", {"trnid": [[2, index]]})
    refused_archive(
        rf"setid.mat names the image {index}, and imagelabels.mat has the images 1 to 5", "flowers102", tmp_path
    )


def test_classes_that_are_not_listed(tmp_path):
    food(tmp_path)
    lists = {"classes": b"pie\n", "train": b"soup/7\n"}
    write_tar(tmp_path / "food-101.tar.gz", {f"food-101/meta/{name}.txt": data for name, data in lists.items()})
    refused_archive("train.txt names the class soup, which classes.txt does not list", "food101", tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "n2\n")
        archive.writestr("tiny-imagenet-200/train/n1/images/n1_0.JPEG", image(1))
    refused_archive("n1_0.JPEG has the class n1, which wnids.txt does not list", "tiny_imagenet", tmp_path)


def test_a_name_that_a_tar_has_twice(tmp_path):
    write_imdb(tmp_path, {("train", "pos"): ["good"], ("test", "neg"): ["bad"]})
    path = tmp_path / "imdb/aclImdb.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for text in (b"good", b"bad"):
            member = tarfile.TarInfo("aclImdb/train/pos/0_1.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    refused(r"aclImdb.tar.gz has two members with the name aclImdb/train/pos/0_1.txt\)", "imdb", tmp_path)
    write_tar(path, {"aclImdb/train/pos/0_1.txt": b"good", "other/train/pos/0_1.txt": b"bad"})
    refused(r"the train split has two examples with the name train/pos/0_1.txt\)", "imdb", tmp_path)


def test_a_name_that_a_zip_has_twice(tmp_path):
    tiny(tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "a") as archive, pytest.warns(UserWarning, match="Dupl"):
        archive.writestr("tiny-imagenet-200/train/n1/images/n1_0.JPEG", image(9))
    wanted = r"zip has two members with the name tiny-imagenet-200/train/n1/images/n1_0.JPEG"
    refused_archive(wanted, "tiny_imagenet", tmp_path)


def test_a_name_that_a_list_has_twice(tmp_path):
    pets(tmp_path)
    write_tar(tmp_path / "annotations.tar.gz", {"annotations/trainval.txt": b"cat_1 1 1 1\ncat_1 37 1 12\n"})
    refused_archive(r"annotations/trainval.txt names images/cat_1.jpg twice", "oxford_pets", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("target", ["/etc/hostname", "images/cat_1.jpg", "images/cat_3.jpg"])
def test_links_in_a_tar(tmp_path, kind, target):
    """A link leads out of the archive, to another member, or to itself."""
    pets(tmp_path)
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("images/cat_1.jpg")
        member.size = len(image(1))
        archive.addfile(member, io.BytesIO(image(1)))
        link = tarfile.TarInfo("images/cat_3.jpg")
        link.type, link.linkname = kind, target
        archive.addfile(link)
    refused_archive(r"images/cat_3.jpg in images.tar.gz is a link or a directory", "oxford_pets", tmp_path)


def test_links_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        link = zipfile.ZipInfo("wikitext-2/wiki.train.tokens")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/hostname")
    refused_archive(r"wiki.train.tokens in wikitext-2-v1.zip is a link or a directory", "wikitext2", tmp_path)


def test_absolute_names_in_a_tar(tmp_path):
    """They are members like others: nothing is written to disk, and the set lacks its images."""
    pets(tmp_path)
    outside = tmp_path / "outside.jpg"
    write_tar(tmp_path / "images.tar.gz", {str(outside): image(1), "../images/cat_1.jpg": image(1)})
    refused_archive(r"images.tar.gz has 0 of 2 images", "oxford_pets", tmp_path)
    assert not outside.exists()
