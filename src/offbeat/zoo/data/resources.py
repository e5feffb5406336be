"""What is published where: names, mirrors, sizes, checksums, classes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One published file."""

    name: str
    urls: tuple[str, ...]
    size: int | None
    """None where it is not published."""
    checksum: str
    """``md5:...``, ``sha256:...``; empty where only the unpacked contents have a published one."""
    repacked: bool = False
    also: tuple[str, ...] = ()
    """Other names of the same, unpacked or packed otherwise; those of folders end with a slash."""


CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR_FIRST_BATCHES = ("data_batch_1.bin", "data_batch_1")
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip


def _idx_files(mirrors: Sequence[str], published: dict[str, tuple[int, str]]) -> list[Resource]:
    """Images and labels to train, images and labels to test with, in MNIST's format."""
    return [
        Resource(
            name=f"{name}-ubyte.gz",
            urls=tuple(f"{mirror}{name}-ubyte.gz" for mirror in mirrors),
            size=size,
            checksum=checksum,
            repacked=True,  # Debian's, for one
            also=(f"{name}-ubyte",),
        )
        for name, (size, checksum) in published.items()
    ]


MNIST = _idx_files(
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    {
        "train-images-idx3": (9_912_422, "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1": (28_881, "md5:d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3": (1_648_877, "md5:9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1": (4_542, "md5:ec29112dd5afa0611ce80d1b7f02629c"),
    },
)
FASHION_MNIST = _idx_files(
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    {
        "train-images-idx3": (26_421_880, "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        "train-labels-idx1": (29_515, "md5:25c81989df183df01b3e8a0aad5dffbe"),
        "t10k-images-idx3": (4_422_102, "md5:bef4ecab320f06d8554ea6380940ec79"),
        "t10k-labels-idx1": (5_148, "md5:bb300cfdad3c16e7a12a480ee83cd310"),
    },
)
CIFAR_10 = Resource(
    name="cifar-10-binary.tar.gz",
    urls=(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
        "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/"
        "cifar-10-binary.tar.gz",
    ),
    size=170_052_171,
    checksum="md5:c32a1d4ab5d03f1284b67883e8d87530",
    also=(
        "cifar-10-batches-bin/",
        "cifar-10-batches-py/",
        *CIFAR_FIRST_BATCHES,
        "cifar-10-python.tar.gz",
        "cifar-10-batches-bin.tar.xz",
        "cifar-10-batches-py.tar.xz",
    ),
)
TINY_SHAKESPEARE = Resource(
    name="input.txt",
    urls=(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ),
    size=1_115_394,
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
ENWIK8 = Resource(
    name="enwik8.zip",
    urls=("http://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
    size=None,
    checksum="",
    also=("enwik8", "enwik8.xz", "enwik8.gz"),
)
ENWIK8_UNPACKED = (100_000_000, "md5:a1fa5ffddb56f4953e226637dabbb36a")
WIKITEXT_2 = Resource(
    name="wikitext-2-v1.zip",
    urls=(
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
    size=None,
    checksum="md5:542ccefacc6c27f945fb54453812b3cd",
    also=("wiki.train.tokens",),
)
GPT_2_MERGES = Resource(
    name="merges.txt",
    urls=(
        "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
        "https://huggingface.co/openai-community/gpt2/resolve/main/merges.txt",
    ),
    size=456_318,
    checksum="sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    also=("vocab.bpe",),
)
