"""The data sets by name: their contents, the raw files they are made of, and where those files come from."""

from __future__ import annotations

import dataclasses
from typing import Literal

from experiments.engine.errors import EngineError

Kind = Literal["image", "text"]
SplitName = Literal["train", "valid", "test"]
ReaderName = Literal[
    "idx",
    "reviews",
    "lines",
    "named_lines",
    "plain",
    "wikitext",
    "pack",
    "oxford_pets",
    "flowers102",
    "food101",
    "tiny_imagenet",
]


@dataclasses.dataclass(frozen=True)
class RawFile:
    """A file as it is published.

    Attributes:
      name: File name in the folder of the data set.
      url: Public address of the file, or None if it is not published.
      sha256: Published SHA-256, or None if there is none. Then SHA256SUMS in the data directory may list one, and the
        sum of a first download is recorded.
    """

    name: str
    url: str | None = None
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """A group of raw files that a data set can be prepared from.

    Attributes:
      reader: Name of a reader in `raw.READERS`.
      files: Raw files, all of which are needed.
    """

    reader: ReaderName
    files: tuple[RawFile, ...]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set that can be prepared.

    Attributes:
      name: Name of the data set and of its folder.
      kind: Kind of its examples: "image" (image, label) or "text" (text, label, id).
      splits: Names of the splits.
      forms: Groups of raw files that it can be prepared from. The last one is published.
      home: Address from which a person can get the raw files, for messages.
      num_classes: Number of classes. Labels are integers from 0 to num_classes - 1.
      channels: Number of channels of its images.
      version: Version of the preparation. It changes when the preparation writes something else.
    """

    name: str
    kind: Kind
    splits: tuple[SplitName, ...]
    forms: tuple[Form, ...]
    home: str
    num_classes: int
    channels: int = 3
    version: str = "1.0.0"


_FASHION = "https://github.com/zalandoresearch/fashion-mnist"
_IMDB = "https://ai.stanford.edu/~amaas/data/sentiment"
_PETS = "https://thor.robots.ox.ac.uk/~vgg/data/pets"
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
_FOOD = "https://data.vision.ee.ethz.ch/cvl"
_TINY = "https://cs231n.stanford.edu"
_ARXIV = "https://huggingface.co/datasets/ccdv/arxiv-classification"
_WIKITEXT = "https://wikitext.smerity.com"
_TRAIN_TEST: tuple[SplitName, ...] = ("train", "test")
_WITH_VALIDATION: tuple[SplitName, ...] = ("train", "valid", "test")
_SUMS = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "aclImdb_v1.tar.gz": "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    "images.tar.gz": "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d",
    "annotations.tar.gz": "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
    "102flowers.tgz": "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
    "imagelabels.mat": "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
    "setid.mat": "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
    "food-101.tar.gz": "d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4",
    "tiny-imagenet-200.zip": "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
}


def _published(reader: ReaderName, address: str, *names: str) -> Form:
    """Returns the published form of a data set, with the sums that are known."""
    return Form(reader, tuple(RawFile(name, f"{address}/{name}", _SUMS.get(name)) for name in names))


def _images(
    name: Literal["oxford_pets", "flowers102", "food101", "tiny_imagenet"],
    num_classes: int,
    pack: str,
    address: str,
    *files: str,
) -> DataSet:
    """Returns a data set of images in colour that is read from one image pack or from the published files."""
    forms = (Form("pack", (RawFile(pack),)), _published(name, address, *files))
    home = f"{address}/{files[0]}" if len(files) == 1 else address
    return DataSet(name, "image", _TRAIN_TEST, forms, home, num_classes)


DATA_SETS = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            "fashion_mnist",
            "image",
            _TRAIN_TEST,
            (_published("idx", f"{_FASHION}/raw/master/data/fashion", *(name for name in _SUMS if "ubyte" in name)),),
            _FASHION,
            num_classes=10,
            channels=1,
        ),
        DataSet(
            "imdb",
            "text",
            _TRAIN_TEST,
            (Form("reviews", (RawFile("aclImdb.tar.gz"),)), _published("reviews", _IMDB, "aclImdb_v1.tar.gz")),
            _IMDB,
            num_classes=2,
        ),
        _images("oxford_pets", 37, "oxford_pets.npz", _PETS, "images.tar.gz", "annotations.tar.gz"),
        _images("flowers102", 102, "flowers102.npz", _FLOWERS, "102flowers.tgz", "imagelabels.mat", "setid.mat"),
        _images("food101", 101, "food10.npz", _FOOD, "food-101.tar.gz"),
        _images("tiny_imagenet", 200, "tiny_imagenet.npz", _TINY, "tiny-imagenet-200.zip"),
        DataSet(
            "arxiv11",
            "text",
            _WITH_VALIDATION,
            (
                Form("lines", tuple(RawFile(f"{split}.jsonl.xz") for split in _WITH_VALIDATION)),
                _published("named_lines", f"{_ARXIV}/resolve/main", "train_data.txt", "val_data.txt", "test_data.txt"),
            ),
            f"{_ARXIV}, or write lines of JSON of your own with id, label11 (0 to 10) and text",
            num_classes=11,
        ),
        DataSet(
            "wikitext2",
            "text",
            _WITH_VALIDATION,
            (
                Form("plain", tuple(RawFile(f"{split}.txt.xz") for split in _WITH_VALIDATION)),
                _published("wikitext", _WIKITEXT, "wikitext-2-v1.zip"),
            ),
            f"{_WIKITEXT}/wikitext-2-v1.zip",
            num_classes=1,
        ),
    )
}


def find(name: str) -> DataSet:
    """Returns the data set with a name."""
    try:
        return DATA_SETS[name]
    except KeyError:
        raise EngineError(f"{name!r} is no data set; use one of {', '.join(DATA_SETS)}") from None
