"""The data sets by name: what they hold, which raw files they are made of, and where those come from."""

from __future__ import annotations

import dataclasses
from typing import Literal

from experiments.engine.errors import EngineError

Kind = Literal["image", "text"]


@dataclasses.dataclass(frozen=True)
class RawFile:
    """A file as it is published.

    Attributes:
      name: below the folder of its data set.
      url: of its public home; None: this form is handed on otherwise.
      sha256: as published; None: not known, then SHA256SUMS in the data dir may tell it.
    """

    name: str
    url: str | None = None
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """Raw files that a data set can be made of.

    Attributes:
      reader: of `raw.READERS`.
      files: all are needed.
    """

    reader: str
    files: tuple[RawFile, ...]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
      name: of it, and of its folder.
      kind: of its examples: "image" (image, label) or "text" (text, label, id).
      splits: by name.
      forms: of its raw files; the last is that of its public home.
      home: where a person gets it, for the message.
      channels: of its images.
      version: of what our preparation makes of it; a change of the preparation is a new one.
    """

    name: str
    kind: Kind
    splits: tuple[str, ...]
    forms: tuple[Form, ...]
    home: str
    channels: int = 3
    version: str = "1.0.0"


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_IMDB = "https://ai.stanford.edu/~amaas/data/sentiment"
_PETS = "https://thor.robots.ox.ac.uk/~vgg/data/pets"
_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
_FOOD = "http://data.vision.ee.ethz.ch/cvl"
_TINY = "http://cs231n.stanford.edu"
_ARXIV = "https://huggingface.co/datasets/ccdv/arxiv-classification"
_WIKITEXT = "https://wikitext.smerity.com"
_TRAIN_TEST, _WITH_VALIDATION = ("train", "test"), ("train", "valid", "test")
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
    "wikitext-2-v1.zip": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
}


def _published(reader: str, home: str, *names: str) -> Form:
    """The form of a public home, with the check sums that are known of it."""
    return Form(reader, tuple(RawFile(name, f"{home}/{name}", _SUMS.get(name)) for name in names))


def _images(name: str, pack: str, home: str, *files: str) -> DataSet:
    """Images in colour: as one image pack, or as they are published."""
    forms = (Form("pack", (RawFile(pack),)), _published(name, home, *files))
    return DataSet(name, "image", _TRAIN_TEST, forms, f"{home}/{files[0]}" if len(files) == 1 else home)


DATA_SETS = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            "fashion_mnist",
            "image",
            _TRAIN_TEST,
            (_published("idx", _FASHION, *(name for name in _SUMS if "ubyte" in name)),),
            "https://github.com/zalandoresearch/fashion-mnist",
            channels=1,
        ),
        DataSet(
            "imdb",
            "text",
            _TRAIN_TEST,
            (Form("reviews", (RawFile("aclImdb.tar.gz"),)), _published("reviews", _IMDB, "aclImdb_v1.tar.gz")),
            _IMDB,
        ),
        _images("oxford_pets", "oxford_pets.npz", _PETS, "images.tar.gz", "annotations.tar.gz"),
        _images("flowers102", "flowers102.npz", _FLOWERS, "102flowers.tgz", "imagelabels.mat", "setid.mat"),
        _images("food101", "food10.npz", _FOOD, "food-101.tar.gz"),
        _images("tiny_imagenet", "tiny_imagenet.npz", _TINY, "tiny-imagenet-200.zip"),
        DataSet(
            "arxiv11",
            "text",
            _WITH_VALIDATION,
            (
                Form("lines", tuple(RawFile(f"{split}.jsonl.xz") for split in _WITH_VALIDATION)),
                _published("named_lines", f"{_ARXIV}/resolve/main", "train_data.txt", "val_data.txt", "test_data.txt"),
            ),
            f"{_ARXIV}, or write lines of JSON of your own with id, label11 (0 to 10) and text",
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
        ),
    )
}


def find(name: str) -> DataSet:
    """The data set of a name."""
    try:
        return DATA_SETS[name]
    except KeyError:
        raise EngineError(f"{name!r} is no data set; use one of {', '.join(DATA_SETS)}") from None
