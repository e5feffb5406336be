"""Data: formats, finding and downloading, damage, batches by key, text and its tokens.

Everything is made here in the original formats; nothing needs the net or files from elsewhere.
"""

import gzip
import http.server
import io
import lzma
import pickle
import re
import struct
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import md5, sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.zoo import DATA, Loader, batches, data_named, digits
from offbeat.zoo.data import resources
from offbeat.zoo.data.bpe import read_merges
from offbeat.zoo.data.files import find
from offbeat.zoo.data.images import Augmentation, Images, Scale, scale_of
from offbeat.zoo.data.resources import Resource
from offbeat.zoo.data.text import Tokens, token_loss


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("OFFBEAT_DATA", str(folder))
    return folder


def idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int = 5, test: int = 3, *, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("t10k", test)):
        images = np.arange(rows * 28 * 28).reshape(rows, 28, 28) % 256
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(rows) % 10)):
            raw = idx(array)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw) if packed else raw)


def cifar_batches(kind: str, rows: int = 4) -> dict[str, bytes]:
    """Six batches; the first pixel of every image and its label tell which one it is."""
    found = {}
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        images = np.zeros((rows, 3072), np.uint8)
        images[:, 0] = 10 * number + np.arange(rows)
        images[:, 1024] = 100  # the first green value
        labels = [(number + row) % 10 for row in range(rows)]
        if kind == "bin":
            columns = np.concatenate([np.array(labels, np.uint8)[:, None], images], 1)
            found[f"{name}.bin"] = columns.tobytes()
        else:
            batch = {b"data": images, b"labels": labels, b"batch_label": b"x", b"filenames": []}
            found[name] = pickle.dumps(batch, protocol=4)
    return found


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def tar_of(path: Path, inner: str, files: dict[str, bytes], packing: str) -> None:
    with tarfile.open(path, f"w:{packing}") as archive:  # type: ignore[call-overload]
        for name, raw in files.items():
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


# ---------------------------------------------------------------------------- image formats


@pytest.mark.parametrize("inside", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_a_folder_of_idx_files(
    tmp_path: Path, inside: str, packed: bool
) -> None:
    write_mnist(tmp_path / inside, packed=packed)
    data = data_named("MNIST", tmp_path, download=False)
    assert (data.shape, data.classes, data.vocabulary) == ((1, 28, 28), 10, None)
    assert (len(data.train), len(data.test)) == (5, 3)
    x, y = next(iter(data.test_loader(3)))
    assert y.tolist() == [0, 1, 2]
    assert y.dtype == torch.int64
    first = torch.arange(784).reshape(28, 28) % 256
    assert torch.allclose(x[0, 0], (first / 255 - 0.13066) / 0.30811, atol=1e-5)


def test_fashion_mnist_has_its_own_files_and_names(tmp_path: Path) -> None:
    write_mnist(tmp_path / "FashionMNIST/raw", packed=False)
    data = data_named("fashion-mnist", tmp_path, download=False)
    assert data.names[9] == "Ankle boot"


@pytest.mark.parametrize("kind", ["bin", "py"])
@pytest.mark.parametrize("layout", ["folder", "inner folder", "tar.gz", "tar.xz"])
def test_cifar_is_read_in_both_versions_packed_or_not(
    tmp_path: Path, kind: str, layout: str
) -> None:
    files = cifar_batches(kind)
    inner = f"cifar-10-batches-{kind}"
    if layout == "folder":
        write_all(tmp_path, files)
    elif layout == "inner folder":
        write_all(tmp_path / "cifar10" / inner, files)
    elif layout == "tar.xz":
        tar_of(tmp_path / f"{inner}.tar.xz", inner, files, "xz")
    else:
        tar_of(tmp_path / "cifar-10-python.tar.gz", inner, files, "gz")
    data = data_named("cifar-10", tmp_path, download=False)
    assert (data.shape, data.classes) == ((3, 32, 32), 10)
    assert isinstance(data.train, Images)
    assert isinstance(data.test, Images)
    firsts = [10 * batch + row for batch in range(5) for row in range(4)]
    assert data.train.pixels[:, 0, 0, 0].tolist() == firsts
    assert data.train.pixels[:, 1, 0, 0].unique().tolist() == [100]
    assert data.train.labels.tolist() == [(n // 10 + n % 10) % 10 for n in firsts]
    assert data.test.labels.tolist() == [5, 6, 7, 8]


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harm",))

    files = cifar_batches("py")
    files["data_batch_3"] = pickle.dumps({b"data": Harm(), b"labels": []}, protocol=4)
    write_all(tmp_path, files)
    with pytest.raises(ConfigurationError, match="data_batch_3 is damaged.*asks to run .*touch"):
        data_named("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()


def test_image_folders_are_split_or_taken_as_split(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("a", "b/train", "b/val"):
        for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(5 if part != "b/val" else 2):
                picture = image.new("RGB", (20, 12), colour)
                picture.save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
            (folder / "notes.txt").write_text("not an image")
    split = data_named("images", tmp_path / "a", side=8)
    assert (len(split.train), len(split.test), split.names) == (8, 2, ("blue", "red"))
    taken = data_named("images", tmp_path / "b", side=8, channels=1)
    assert (len(taken.train), len(taken.test), taken.shape) == (10, 4, (1, 8, 8))
    assert isinstance(split.train, Images)
    red = split.train.pixels[split.train.labels == 1]
    assert red.shape[1:] == (3, 8, 8)
    assert int(red[:, 0].min()) > 250
    assert int(red[:, 1:].max()) < 5
    assert split.train.augmentation == Augmentation(pad=1, flip=True)


def test_image_folders_that_cannot_be_read_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="needs folder="):
        data_named("images")
    with pytest.raises(ConfigurationError, match="no sub-folders"):
        data_named("images", tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ConfigurationError, match="no PNG or JPEG"):
        data_named("images", tmp_path)
    for name in ("1.png", "2.png"):
        (tmp_path / "cat" / name).write_bytes(b"\x89PNG nonsense")
    pytest.importorskip("PIL.Image")
    with pytest.raises(ConfigurationError, match=r"cat/\d.png is damaged: .*13 bytes"):
        data_named("images", tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match="Pillow.*pip install"):
        data_named("images", tmp_path)


# ---------------------------------------------------------------------------- damage


def test_a_cut_or_changed_file_is_named_with_what_was_expected_and_found(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[:-20])
    with pytest.raises(ConfigurationError, match=rf"{images} is damaged.*{len(whole) - 20:,} byt"):
        data_named("mnist", tmp_path)
    raw = gzip.decompress(whole)
    images.write_bytes(gzip.compress(raw[:-100]))
    with pytest.raises(ConfigurationError, match=r"3,836 bytes unpacked instead of 3,936"):
        data_named("mnist", tmp_path)
    images.write_bytes(b"<html>")
    with pytest.raises(ConfigurationError, match=r"3c 68 74 6d.*00 00 08 03"):
        data_named("mnist", tmp_path)


def test_labels_must_fit_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(np.arange(2))))
    with pytest.raises(ConfigurationError, match="2 labels for the 3 images"):
        data_named("mnist", tmp_path)
    labels.write_bytes(gzip.compress(idx(np.array([1, 2, 10]))))
    with pytest.raises(ConfigurationError, match="a label is 10"):
        data_named("mnist", tmp_path)


def test_a_file_of_the_published_name_must_be_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"half")
    with pytest.raises(ConfigurationError, match="4 bytes instead of 170,052,171"):
        data_named("cifar10", tmp_path)
    (tmp_path / "input.txt").write_bytes(b"x" * 1_115_394)
    with pytest.raises(ConfigurationError, match="checksum sha256:.* instead of sha256:86c4e6aa"):
        data_named("tinyshakespeare", tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("data_batch_2.bin", b"\x00" * 3072, "3,072 bytes instead of a multiple of 3,073"),
        ("data_batch_2.bin", b"\xff" * 3073, "a label is 255"),
        ("data_batch_2.bin", None, "data_batch_2 not in it"),
    ],
)
def test_damaged_cifar_batches_are_named(
    tmp_path: Path, name: str, raw: bytes | None, words: str
) -> None:
    files = cifar_batches("bin")
    del files[name]
    write_all(tmp_path, files if raw is None else files | {name: raw})
    with pytest.raises(ConfigurationError, match=words):
        data_named("cifar10", tmp_path)


def test_a_cut_pickle_is_named(tmp_path: Path) -> None:
    files = cifar_batches("py")
    files["test_batch"] = files["test_batch"][:1000]
    write_all(tmp_path, files)
    with pytest.raises(ConfigurationError, match=r"test_batch is damaged: .*1,000 bytes"):
        data_named("cifar10", tmp_path)


# ---------------------------------------------------------------------------- downloading


class _Mirror(http.server.BaseHTTPRequestHandler):
    """/whole, /wrong, /cut (promises more than it sends); everything else is not found."""

    payload = b"the published bytes" * 100

    def do_GET(self) -> None:
        sent = {"/whole": self.payload, "/wrong": self.payload[::-1], "/cut": self.payload[:77]}
        body = sent.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.payload)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def mirror() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Mirror) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def resource(*urls: str) -> Resource:
    payload = _Mirror.payload
    checksum = f"sha256:{sha256(payload).hexdigest()}"
    return Resource(name="file.bin", urls=urls, size=len(payload), checksum=checksum)


def test_a_download_is_checked_kept_and_not_repeated(
    mirror: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = find("thing", resource(f"{mirror}/whole"))
    assert path == cache / "thing" / "file.bin"
    assert path.read_bytes() == _Mirror.payload
    shown = capsys.readouterr()
    assert "downloading file.bin (0.0 MB)" in shown.err
    assert not shown.out
    assert find("thing", resource("http://127.0.0.1:9/unreachable")) == path


def test_the_next_mirror_is_asked_when_one_is_missing_wrong_or_breaks_off(
    mirror: str, cache: Path
) -> None:
    urls = [f"{mirror}/{name}" for name in ("none", "wrong", "cut", "whole")]
    assert find("thing", resource(*urls)).read_bytes() == _Mirror.payload
    assert [path.name for path in (cache / "thing").iterdir()] == ["file.bin"]


def test_a_download_that_fails_leaves_nothing_and_says_why(
    mirror: str, cache: Path, tmp_path: Path
) -> None:
    urls = [f"{mirror}/{name}" for name in ("none", "wrong", "cut")]
    with pytest.raises(ConfigurationError) as caught:
        find("thing", resource(*urls), tmp_path)
    words = str(caught.value)
    assert "\n" not in words
    assert f"is not in {tmp_path / 'thing'} or {tmp_path} or {cache / 'thing'}, and" in words
    assert "/none: HTTP Error 404" in words
    assert re.search(r"/wrong: checksum sha256:\w{64} instead of sha256:", words)
    assert "/cut: the connection ended after 77 of 1,900 bytes" in words
    assert "OFFBEAT_DATA" in words
    assert not list((cache / "thing").iterdir())


def test_files_are_mirrors_too_and_downloads_can_be_forbidden(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(_Mirror.payload)
    url = (tmp_path / "there").as_uri()
    with pytest.raises(ConfigurationError, match="download=False"):
        find("thing", resource(url), download=False)
    assert find("thing", resource(url)).read_bytes() == _Mirror.payload


def test_a_damaged_file_in_the_cache_is_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "there").write_bytes(_Mirror.payload)
    path = find("thing", resource((tmp_path / "there").as_uri()))
    path.write_bytes(_Mirror.payload[:-1])
    with pytest.raises(ConfigurationError, match=rf"{path} is damaged: 1,899 bytes instead of 1,9"):
        find("thing", resource())
    path.write_bytes(_Mirror.payload[::-1])
    with pytest.raises(ConfigurationError, match=rf"{path} is damaged: checksum sha256:"):
        find("thing", resource())


def test_the_given_folder_comes_before_the_cache(tmp_path: Path, cache: Path) -> None:
    write_mnist(cache / "mnist", train=2)
    write_mnist(tmp_path, train=4)
    assert len(data_named("mnist", tmp_path, download=False).train) == 4
    assert len(data_named("mnist", download=False).train) == 2


def test_an_unwritable_cache_and_a_folder_that_is_none_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="could not be downloaded .*Not a directory"):
        find("thing", resource("http://127.0.0.1:9/"))
    with pytest.raises(ConfigurationError, match="not a folder"):
        data_named("mnist", tmp_path / "nowhere")


# ---------------------------------------------------------------------------- batches of images


def counted_images(rows: int, augmentation: Augmentation | None = None) -> Images:
    pixels = torch.arange(rows * 2 * 6 * 6).reshape(rows, 2, 6, 6) % 251
    scale = Scale(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    return Images(pixels.to(torch.uint8), torch.arange(rows), scale, augmentation)


def test_an_epoch_holds_every_row_once_normalised_by_channel() -> None:
    images = counted_images(10)
    loader = Loader(images, 4)
    found = list(loader)
    assert [len(x) for x, _ in found] == [4, 4, 2]
    rows = torch.cat([y for _, y in found])
    assert sorted(rows.tolist()) == list(range(10))
    expected = images.pixels[rows].float()
    expected[:, 0] = (expected[:, 0] - 1) / 2
    expected[:, 1] = (expected[:, 1] - 2) / 4
    assert torch.equal(torch.cat([x for x, _ in found]), expected)
    assert len(list(Loader(images, 4, drop_last=True))) == 2
    with pytest.raises(ConfigurationError, match="10 rows make no batch of 11"):
        Loader(images, 11, drop_last=True)
    with pytest.raises(ConfigurationError, match="batch_size"):
        Loader(images, 0)


def test_digits_as_data_are_the_digits_of_the_function_batch_by_batch() -> None:
    x, y, x_test, y_test = digits(seed=1)
    data = data_named("digits", seed=1)
    loader = data.loader(64, seed=5)
    for epoch in range(2):
        for ours, theirs in zip(loader, batches(x, y, 64, seed=5, epoch=epoch), strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
    ((whole, targets),) = data.test_loader(1000)
    assert torch.equal(whole, x_test)
    assert torch.equal(targets, y_test)


def test_a_crop_is_a_window_of_the_bordered_image_mirrored_or_not() -> None:
    images = counted_images(40).pixels
    augmented = Augmentation(pad=2, flip=True)(images, torch.Generator().manual_seed(0))
    bordered = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for row, found in enumerate(augmented):
        windows = {
            (down, right, flipped): window.flip(2) if flipped else window
            for down in range(5)
            for right in range(5)
            for flipped in (False, True)
            for window in [bordered[row, :, down : down + 6, right : right + 6]]
        }
        seen |= {place for place, window in windows.items() if torch.equal(window, found)}
        assert any(torch.equal(window, found) for window in windows.values())
    assert {down for down, _, _ in seen} == {right for _, right, _ in seen} == set(range(5))
    assert {flipped for _, _, flipped in seen} == {False, True}


def test_augmentation_is_keyed_and_can_be_left_out() -> None:
    images = counted_images(12, Augmentation(pad=2, flip=True))
    loader = Loader(images, 6, seed=1)
    x, y = loader.read(2, 1)
    torch.manual_seed(3)
    again, _ = Loader(images, 6, seed=1).read(2, 1)
    assert torch.equal(x, again)
    for seed, epoch, number in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        assert not torch.equal(x, Loader(images, 6, seed=seed).read(epoch, number)[0])
    alike = counted_images(12, images.augmentation)
    alike.pixels[:] = alike.pixels[0].clone()
    assert not torch.equal(Loader(alike, 6).read(0, 0)[0], Loader(alike, 6).read(0, 1)[0])
    plain, same = Loader(images, 6, seed=1, augment=False).read(2, 1)
    assert torch.equal(y, same)
    assert torch.equal(plain, Loader(counted_images(12), 6, seed=1).read(2, 1)[0])
    state = torch.get_rng_state()
    list(loader)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_saved_position_is_taken_up_again(stop: int) -> None:
    images = counted_images(11, Augmentation(pad=1, flip=True))
    straight = Loader(images, 4, seed=2)
    expected = [batch for _ in range(3) for batch in straight]
    first, second = Loader(images, 4, seed=2), Loader(images, 4, seed=2)
    found = list(first)  # the first epoch
    if stop:
        for number, batch in enumerate(first, start=1):
            found.append(batch)
            if number == stop:
                break
    second.load_state_dict(first.state_dict())
    assert len(second) == 3 - stop % 3
    while second.epoch < 3:
        found += list(second)
    assert len(found) == len(expected) == 9
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_the_length_is_that_of_the_present_pass() -> None:
    loader = Loader(counted_images(10), 4)
    lengths = []
    for number, _ in enumerate(loader):
        lengths.append(len(loader))
        if number == 1:
            break
    assert lengths == [3, 3]
    assert len(loader) == 1
    list(loader)
    assert (len(loader), loader.epoch, loader.position) == (3, 1, 0)
    loader.seek(4, 2)
    assert (len(loader), len(list(loader)), loader.epoch) == (1, 1, 5)
    left_open = iter(loader)
    next(left_open)
    assert [len(loader) for _ in loader] == [2, 2]


def test_positions_that_mean_something_else_are_refused() -> None:
    state = Loader(counted_images(10), 4, seed=1).state_dict()
    with pytest.raises(ConfigurationError, match="batch_size=4, this one has batch_size=5"):
        Loader(counted_images(10), 5, seed=1).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="seed=1, this one has seed=0"):
        Loader(counted_images(10), 4).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="an epoch has 3 batches"):
        Loader(counted_images(10), 4).seek(0, 4)


def test_test_loaders_read_in_order_time_and_again() -> None:
    loader = Loader(counted_images(5), 2, train=False, augment=False)
    for _ in range(2):
        assert torch.cat([y for _, y in loader]).tolist() == [0, 1, 2, 3, 4]
    assert loader.epoch == 0


def test_scales_are_exact() -> None:
    pixels = torch.randint(256, (5000, 2, 3, 3), dtype=torch.uint8)
    scale = scale_of(pixels)
    plain = pixels.double()
    assert torch.allclose(scale.mean.double(), plain.mean((0, 2, 3)))
    assert torch.allclose(scale.deviation.double(), plain.std((0, 2, 3), correction=0))


# ---------------------------------------------------------------------------- text


def test_training_windows_are_keyed_by_seed_and_step_and_targets_are_one_further() -> None:
    source = Tokens(torch.arange(101, dtype=torch.int32), 10)
    loader = Loader(source, 4, seed=0)
    assert len(loader) == 2  # ten windows of ten tokens: two full batches
    x, y = loader.read(0, 0)
    assert x.shape == y.shape == (4, 10)
    assert x.dtype == torch.int64
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], x[:, :-1] + 1)
    assert torch.equal(loader.read(1, 0)[0], loader.read(0, 2)[0])  # step 2 both
    assert not torch.equal(loader.read(1, 0)[0], x)
    starts = torch.cat([loader.read(0, n)[0][:, 0] for n in range(200)])
    assert (int(starts.min()), int(starts.max())) == (0, 90)


def test_validation_windows_follow_each_other() -> None:
    source = Tokens(torch.arange(36, dtype=torch.int32), 10)
    found = list(Loader(source, 2, train=False))
    assert [len(x) for x, _ in found] == [2, 1]
    assert torch.cat([x for x, _ in found]).flatten().tolist() == list(range(30))
    assert torch.cat([y for _, y in found]).flatten().tolist() == list(range(1, 31))
    with pytest.raises(ConfigurationError, match="has 10 tokens.*context=10"):
        Tokens(torch.arange(10), 10)


def test_a_text_file_as_characters(tmp_path: Path) -> None:
    content = "the cat sät on the mat. " * 20
    (tmp_path / "cat.txt").write_text(content, encoding="utf-8")
    data = data_named("text", file=tmp_path / "cat.txt", context=8)
    assert (data.name, data.shape) == ("cat", (8,))
    assert data.vocabulary == len(set(content))
    assert isinstance(data.train, Tokens)
    assert isinstance(data.test, Tokens)
    assert data.train.numbers.dtype == torch.uint8
    assert data.decode is not None
    whole = data.decode(data.train.numbers) + data.decode(data.test.numbers)
    assert whole == content
    assert len(data.test.numbers) == pytest.approx(0.1 * len(content), abs=2)
    assert data_named("text", tmp_path / "cat.txt", context=8).vocabulary == data.vocabulary


def test_no_character_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("東" * 101, encoding="utf-8")
    data = data_named("text", file=tmp_path / "a.txt", context=4, test_share=0.5)
    assert data.vocabulary == 1
    assert isinstance(data.train, Tokens)
    assert len(data.train.numbers) == 51
    raw = data_named("text", file=tmp_path / "a.txt", context=4, test_share=0.5, unit="bytes")
    assert isinstance(raw.train, Tokens)
    assert len(raw.train.numbers) == 151


@pytest.mark.parametrize("space", [" ", "\n", "\u3000"])
def test_no_word_is_cut_in_two(tmp_path: Path, space: str) -> None:
    words = [f"wört{n}" for n in range(100)]
    (tmp_path / "a.txt").write_text(space.join(words), encoding="utf-8")
    for share in (0.5, 0.51, 0.511, 0.515, 0.52):
        data = data_named("text", tmp_path / "a.txt", unit="words", context=4, test_share=share)
        assert data.vocabulary == 101  # and <eos>
        assert data.decode is not None
        assert isinstance(data.train, Tokens)
        assert isinstance(data.test, Tokens)
        train, test = (data.decode(part.numbers).split() for part in (data.train, data.test))
        assert [word for word in train + test if word != "<eos>"] == words
        # The word at the place goes to the training part, and no line end is counted twice.
        assert len(test) == pytest.approx(share * len(train + test), abs=4)
        assert (train + test).count("<eos>") == (100 if space == "\n" else 2)


def test_parts_without_a_line_end_do_not_make_one_word(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.tokens").write_text(f"a b {part}")
    assert data_named("wikitext-2", tmp_path, context=2).vocabulary == 6


def test_bytes_need_no_encoding_and_other_units_say_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 30)
    data = data_named("text", file=path, unit="bytes", context=4)
    assert data.vocabulary == 256
    with pytest.raises(ConfigurationError, match=r'not UTF-8 \(byte 0xe9 at place 3\).*"bytes"'):
        data_named("text", file=path, context=4)
    with pytest.raises(ConfigurationError, match="unknown unit 'byte'. Did you mean 'bytes'"):
        data_named("text", file=path, unit="byte")
    with pytest.raises(ConfigurationError, match="is not a file"):
        data_named("text", file=tmp_path)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        data_named("text", file=path, test_share=1.0)


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    by_hand = -logits.log_softmax(2).gather(2, targets[:, :, None]).mean()
    assert torch.allclose(token_loss(logits, targets), by_hand)


@pytest.mark.parametrize("packing", ["enwik8", "enwik8.zip", "enwik8.xz", "enwik8.gz"])
def test_enwik8_is_cut_at_90_and_95_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    raw = bytes(range(200)) * 5
    monkeypatch.setattr(resources, "ENWIK8_UNPACKED", (len(raw), f"md5:{md5(raw).hexdigest()}"))
    path = tmp_path / packing
    if packing.endswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("enwik8", raw)
    else:
        packed = {"xz": lzma.compress(raw), "gz": gzip.compress(raw)}
        path.write_bytes(packed.get(packing[-2:], raw))
    data = data_named("enwik8", tmp_path, context=16, download=False)
    parts = [data.train, data.validation, data.test]
    assert [len(part.numbers) for part in parts if isinstance(part, Tokens)] == [900, 50, 50]
    monkeypatch.setattr(resources, "ENWIK8_UNPACKED", (len(raw), "md5:0"))
    with pytest.raises(ConfigurationError, match=f"{packing} is damaged: checksum md5:.*md5:0"):
        data_named("enwik8", tmp_path, context=16)
    monkeypatch.setattr(resources, "ENWIK8_UNPACKED", (10**8, "md5:0"))
    with pytest.raises(ConfigurationError, match="1,000 bytes unpacked instead of 100,000,000"):
        data_named("enwik8", tmp_path, context=16)


@pytest.mark.parametrize("packed", [True, False])
def test_wikitext_has_three_parts_and_counts_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    lines = " \n = Head = \n the <unk> cat \n"
    files = {f"wiki.{part}.tokens": lines.encode() for part in ("train", "valid", "test")}
    if packed:
        with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
            for name, raw in files.items():
                archive.writestr(f"wikitext-2/{name}", raw)
        found = md5((tmp_path / "wikitext-2-v1.zip").read_bytes()).hexdigest()
        changed = replace(resources.WIKITEXT_2, checksum=f"md5:{found}")
        monkeypatch.setattr(resources, "WIKITEXT_2", changed)
    else:
        write_all(tmp_path / "wikitext-2", files)
    data = data_named("wikitext-2", tmp_path, context=4, download=False)
    assert data.vocabulary == len({"<eos>", "=", "Head", "the", "<unk>", "cat"})
    assert isinstance(data.validation, Tokens)
    assert data.decode is not None
    words = "<eos> = Head = <eos> the <unk> cat <eos>"
    assert data.decode(data.validation.numbers) == words
    assert len(data.test_loader(2, part="validation")) == 1


def test_parts_that_do_not_exist_are_answered() -> None:
    with pytest.raises(ConfigurationError, match="no part 'validation'. It has: train, test"):
        data_named("digits").test_loader(4, part="validation")


# ---------------------------------------------------------------------------- GPT-2's tokens

# The merges that four sentences need, with their true places among the 50,000 of GPT-2's list.
MERGES = """
    0:Ġ+t 2:h+e 5:o+n 6:Ġt+he 7:e+r 10:Ġ+w 11:Ġ+o 17:o+r 19:Ġ+b 21:Ġ+f 32:Ġ+d 35:i+c 41:l+l
    43:Ġ+n 44:Ġ+l 47:v+e 49:r+o 76:v+er 79:l+d 109:k+e 132:u+m 165:q+u 208:T+he 210:Ġd+o 214:'+t
    218:Ġ+j 220:Ġw+or 266:i+ke 332:Ġl+ike 368:ic+k 369:Ġo+ver 371:Ġ+qu 419:w+n 439:e+ll
    580:Ġd+on 606:p+s 739:Ġwor+ld 775:a+z 809:1+2 884:o+x 1123:Ġb+ro 1331:Ġ+Â 1812:Ġqu+ick
    1975:4+5 3034:Ġdo+g 7330:Ġbro+wn 7886:um+ps 9907:12+3 10289:Ġ+æ 10853:ell+o 12129:Ġn+a
    12326:az+y 12603:ä+º 15240:H+ello 16675:Ġl+azy 17789:Ġj+umps 21575:Ġf+ox 24952:ĠÂ+½
    26628:Ã+¯ 38520:Ã¯+ve 41236:Ġna+Ã¯ve
"""
KNOWN = {
    "Hello world": [15496, 995],
    "Hello, world!": [15496, 11, 995, 0],
    "The quick brown fox jumps over the lazy dog": [
        *(464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290)
    ],
    "I don't  like\n\n12345 naïve 東京 ½": [
        *(40, 836, 470, 220, 588, 198, 198, 10163, 2231, 41492, 10545, 251, 109, 12859, 105, 25208)
    ],
}


def write_merges(path: Path) -> Path:
    """Merges that no text here needs fill the places between."""
    needed = dict(merge.split(":") for merge in MERGES.split())
    lines = [needed.get(str(place), "Ā+Ā").replace("+", " ") for place in range(50_000)]
    path.write_text("#version: 0.2\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_gpt_2_encodings_are_the_published_ones(tmp_path: Path) -> None:
    pairs = read_merges(write_merges(tmp_path / "merges.txt"))
    assert pairs.size == 50_257  # the last one is <|endoftext|>
    for text, numbers in KNOWN.items():
        assert pairs.encode(text) == numbers
        assert pairs.decode(numbers) == text
    for text in ("", "\x1c\x00 ²٣ß\u3000\u200b \r\n\t 🙂  ", "<|endoftext|>"):
        assert pairs.decode(pairs.encode(text)) == text
    assert pairs.decode([50_256]) == "<|endoftext|>"


def test_a_text_as_gpt_2_tokens_finds_the_merges_beside_it(tmp_path: Path) -> None:
    (tmp_path / "gpt2-bpe").mkdir()
    write_merges(tmp_path / "gpt2-bpe" / "vocab.bpe")
    (tmp_path / "fox.txt").write_text("The quick brown fox jumps over the lazy dog" * 10)
    data = data_named(
        "text", tmp_path, file=tmp_path / "fox.txt", unit="gpt2", context=4, download=False
    )
    assert data.vocabulary == 50_257
    assert isinstance(data.train, Tokens)
    assert data.train.numbers[:3].tolist() == [464, 2068, 7586]


def test_damaged_and_missing_merges_are_named(tmp_path: Path) -> None:
    path = tmp_path / "vocab.bpe"
    path.write_text("#version: 0.2\nh e\nxy z\n")
    with pytest.raises(ConfigurationError, match="vocab.bpe is damaged: it merges 'xy'"):
        read_merges(path)
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(ConfigurationError, match="'gpt2-bpe': merges.txt is not in .*download=Fal"):
        data_named("text", file=tmp_path / "a.txt", unit="gpt2", download=False)


# ---------------------------------------------------------------------------- by name


def test_unknown_names_and_settings_are_answered() -> None:
    assert {"digits", "mnist", "cifar10", "images", "text"} <= set(DATA)
    with pytest.raises(ConfigurationError, match="unknown data 'cifar'. Did you mean 'cifar10'"):
        data_named("cifar")
    with pytest.raises(ConfigurationError, match="setting of data digits.*Did you mean 'seed'"):
        data_named("digits", sead=1)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("digits", {"test_share": "x"}, "data digits: test_share='x': give a number."),
        ("digits", {"seed": "x"}, "data digits: seed='x': give a whole number."),
        ("digits", {"seed": True}, "data digits: seed=True: give a whole number."),
        ("text", {"test_share": "x"}, "data text: test_share='x': give a number."),
        ("text", {"file": 123}, "data text: file=123: give a path, as in './123'."),
        ("text", {"context": None}, "data text: context=None: give a whole number."),
        ("images", {"test_share": "x"}, "data images: test_share='x': give a number."),
        ("images", {"pad": "x"}, "data images: pad='x': give a whole number or None."),
        ("images", {"pad": -1}, "pad=-1: give a border of 0 pixels or more."),
        ("images", {"flip": "no"}, "data images: flip='no': give true or false."),
        ("enwik8", {"download": "no"}, "data enwik8: download='no': give true or false."),
    ],
)
def test_settings_of_a_wrong_type_are_answered(
    tmp_path: Path, name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        data_named(name, tmp_path, **settings)


def test_numbers_of_numpy_are_numbers() -> None:
    assert len(data_named("digits", seed=np.int64(3), test_share=np.float32(0.5)).test) == 898
