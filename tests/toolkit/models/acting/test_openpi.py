"""openpi's wire format: its byte strings, and what is refused."""

from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image

msgpack = pytest.importorskip("msgpack", reason="pip install -e '.[serve]'")

from vla_rl.toolkit.models.acting import openpi  # noqa: E402
from vla_rl.toolkit.models.acting.openpi import FrameError, pack_frame, unpack_frame  # noqa: E402

ARRAY = "84c40b5f5f6e6461727261795f5fc3c40464617461c4080000803f00000040c4056474797065a33c6634c40573686170659102"
NUMBER = "83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3fe0000000000000c4056474797065a33c6634"


@pytest.mark.parametrize(
    ("value", "written"),
    [(np.array([1, 2], np.float32), ARRAY), (np.float32(0.5), NUMBER), ({}, "80")],
    ids=["array", "number", "empty map"],
)
def test_bytes_are_those_of_openpi(value, written):
    """The expected bytes are from msgpack 1.2.4 with openpi's own packer."""
    assert pack_frame(value).hex() == written
    found = unpack_frame(bytes.fromhex(written))
    assert np.array_equal(found, value) and type(found) is type(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("text_keys", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", ">f4"])
def test_arrays_come_back(dtype, text_keys):
    array = np.arange(24).reshape(2, 3, 4)[:, ::-1].astype(dtype)
    found = unpack_frame(pack_frame({"a": [array, "text", 1, None], "b": array[:, :0]}, text_keys))
    assert found["a"][0].dtype == array.dtype and np.array_equal(found["a"][0], array)
    assert found["a"][1:] == ["text", 1, None] and found["b"].shape == (2, 0, 4)


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(2, complex), np.zeros(1, "f4,f4"), object(), {1, 2}])
def test_what_is_not_a_number_is_not_sent(value):
    with pytest.raises(FrameError, match="cannot be sent"):
        pack_frame({"a": value})


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_compressed_images_are_read(name):
    image = np.full((6, 5, 3), 77, np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, name)
    found = unpack_frame(
        msgpack.packb({"__image__": True, "format": name, "data": file.getvalue(), "shape": [6, 5, 3]})
    )
    assert found.dtype == np.uint8 and np.abs(found.astype(int) - image).max() <= 2


def test_images_of_a_frame_are_measured_together_before_one_is_decoded(monkeypatch):
    file = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(file, "png")
    image = {"__image__": True, "format": "png", "data": file.getvalue()}
    kept = unpack_frame(msgpack.packb([image] * 3), decode=False)
    assert [image.size for image in kept] == [(2000, 3000)] * 3 and kept[0].decode().shape == (2000, 3000, 3)
    monkeypatch.setattr(openpi.EncodedImage, "decode", lambda self: pytest.fail("decoded"))
    with pytest.raises(FrameError, match="too large: with one of 3000 x 2000 pixels they have more than 16777216"):
        unpack_frame(msgpack.packb({"a": {"b": [image] * 3}}))


PLAIN = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}


def nested(depth):
    return [] if not depth else [nested(depth - 1)]


HOSTILE = {
    "an array of objects": ({**PLAIN, b"dtype": "|O"}, "bool, integers or floats"),
    "a structure": ({**PLAIN, b"dtype": "f4,f4"}, "bool, integers or floats"),
    "a shape within a dtype": ({**PLAIN, b"dtype": "(2,)f4"}, "bool, integers or floats"),
    "void": ({**PLAIN, b"dtype": "|V8"}, "bool, integers or floats"),
    "complex": ({**PLAIN, b"dtype": "<c8"}, "bool, integers or floats"),
    "text": ({**PLAIN, b"dtype": "<U2"}, "bool, integers or floats"),
    "dates": ({**PLAIN, b"dtype": "<M8[s]"}, "bool, integers or floats"),
    "no dtype": ({**PLAIN, b"dtype": None}, "bool, integers or floats"),
    "a dtype of nonsense": ({**PLAIN, b"dtype": "f4" * 10_000}, "bool, integers or floats"),
    "fewer bytes than its shape": ({**PLAIN, b"shape": [3]}, r"float32 \[3\] has 8 bytes"),
    "more bytes than its shape": ({**PLAIN, b"shape": [1]}, "has 8 bytes"),
    "a huge shape": ({**PLAIN, b"shape": [2**62, 2**62]}, "has 8 bytes"),
    "a negative shape": ({**PLAIN, b"shape": [-2, -1]}, "shape is"),
    "a shape of flags": ({**PLAIN, b"shape": [True, 2]}, "shape is"),
    "a shape of floats": ({**PLAIN, b"shape": [2.0]}, "shape is"),
    "many dimensions": ({**PLAIN, b"shape": [1] * 40}, "needs bytes as its data"),
    "no shape": ({**PLAIN, b"shape": None}, "needs bytes as its data"),
    "text for data": ({**PLAIN, b"data": "12345678"}, "needs bytes as its data"),
    "a number of text": ({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}, "not a number"),
    "a number of objects": ({b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}, "bool, integers or floats"),
    "an image in another format": ({"__image__": True, "format": "tiff", "data": b""}, "raw, png or jpeg"),
    "an image of nonsense": ({"__image__": True, "format": "png", "data": b"\x89PNG"}, "cannot be read as png"),
    "depth": (nested(9), "within each other"),
    "great depth": (b"\x91" * 5000, "cannot be read|within each other"),
    "a long list": ([0] * 5000, "cannot be read"),
    "many lists": ([[0] * 4000] * 6, "more than 20000 items"),
    "a promise of length": (b"\xdd\xff\xff\xff\xff", "cannot be read"),
    "a promise of bytes": (b"\xc6\xff\xff\xff\xff", "cannot be read"),
    "an extension": (b"\xc7\x01\x05\x00", "cannot be read"),
    "a key that is a number": ({1: 2}, "cannot be read"),
    "text that is not UTF-8": (b"\xa2\xff\xff", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "something behind": (b"\x80\x80", "cannot be read"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_not_a_frame_is_refused(data, message):
    frame = data if isinstance(data, bytes) else msgpack.packb(data)
    with pytest.raises(FrameError, match=message):
        unpack_frame(frame)


def test_a_frame_has_a_limit(monkeypatch):
    monkeypatch.setattr(openpi, "MAX_FRAME", 100)
    with pytest.raises(FrameError, match="101 bytes, more than 100"):
        unpack_frame(bytes(101))


def test_an_image_that_grows_is_refused_before_it_does():
    """A million pixels of one colour are a kilobyte, and a hundred million are a hundred."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "png")
    frame = msgpack.packb({"__image__": True, "format": "png", "data": file.getvalue()})
    tracemalloc.start()
    with pytest.raises(FrameError, match=r"too large|cannot be read"):
        unpack_frame(frame)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
