"""SRPO's video encoder: which frames it sees, how they are prepared, and which checkpoints it takes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from algorithm_cases import cases_of
from PIL import Image
from test_srpo import array
from transformers import VJEPA2Config, VJEPA2Model

from vla_rl.core.randomness import generator
from vla_rl.plugins.algorithms.srpo import impl as module
from vla_rl.plugins.algorithms.srpo.config import EncoderSettings
from vla_rl.plugins.algorithms.srpo.impl import (
    EncoderError,
    TrajectoryEncoder,
    check_encoder,
    frame_indices,
    load_model,
    preprocess_frames,
)

SMALL = {"frames": 4, "image_size": 32}
SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 1, "pred_hidden_size": 12,
         "pred_num_hidden_layers": 1, "pred_num_attention_heads": 1, "crop_size": 32}  # fmt: skip


def film(frames: int, height: int = 20, width: int = 20) -> np.ndarray:
    return generator(frames, "film").integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def encoder_of(name="tiny", **keys) -> TrajectoryEncoder:
    return TrajectoryEncoder(EncoderSettings(encoder=str(name), **{**SMALL, **keys}), "cpu")


@pytest.fixture(scope="module")
def tiny() -> TrajectoryEncoder:
    return encoder_of()


@pytest.fixture
def checkpoint(tmp_path):
    """A small folder as transformers writes it, which is how the hub's V-JEPA 2 repositories look."""
    torch.manual_seed(3)
    VJEPA2Model(VJEPA2Config(**SIZES)).save_pretrained(tmp_path / "vjepa2")
    return tmp_path / "vjepa2"


# ----------------------------------------------------------------------------------------------------- frames


def test_frame_indices_equal_the_reference():
    for _, case in cases_of("vjepa_frame_indices.json"):
        assert frame_indices(case["frames"], 64).tolist() == array(case["indices"]).tolist(), case["id"]


def test_frames_are_even_or_repeated():
    assert frame_indices(3, 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert frame_indices(8, 8).tolist() == list(range(8))
    assert frame_indices(101, 5).tolist() == [0, 25, 50, 75, 100]
    for count in range(64, 700):
        assert frame_indices(count, 64).tolist() == [int(i) for i in np.linspace(0, count - 1, 64)]


@pytest.mark.parametrize(("height", "width"), [(20, 20), (100, 64), (64, 100)])
def test_preprocessing_equals_pillow(height, width):
    frames, size = film(2, height, width), 56
    short = int(256 / 224 * size)
    scaled = (short, int(short * height / width)) if width < height else (int(short * width / height), short)
    left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    got = preprocess_frames(frames, size, "cpu")
    assert got.shape == (2, 3, size, size)
    for frame, seen in zip(frames, got, strict=True):
        resized = Image.fromarray(frame).resize(scaled, Image.Resampling.BILINEAR)
        cropped = np.asarray(resized.crop((left, top, left + size, top + size)), np.float32)
        back = seen.permute(1, 2, 0).numpy() * module.IMAGENET_STD + module.IMAGENET_MEAN
        np.testing.assert_allclose(back * 255, cropped, atol=1.001)


# -------------------------------------------------------------------------------------------------- embeddings


def test_an_embedding_is_the_mean_of_the_tokens_of_the_chosen_frames(tiny):
    frames = film(11)
    clip = preprocess_frames(frames[[0, 3, 6, 10]], 32, "cpu")
    with torch.no_grad():
        tokens = tiny.model.get_vision_features(clip[None])
    assert tokens.shape == (1, 2 * 2 * 2, 48)
    torch.testing.assert_close(tiny([frames])[0], tokens.mean(1)[0])


def test_batches_and_gaps_change_nothing(tiny, monkeypatch):
    films = [film(5), np.zeros((0, 20, 20, 3), np.uint8), film(1), film(9), film(4)]
    sizes = []
    monkeypatch.setattr(module, "BATCH", 2)
    forward = tiny.model.get_vision_features
    monkeypatch.setattr(tiny.model, "get_vision_features", lambda clips: sizes.append(len(clips)) or forward(clips))
    together = tiny(films)
    assert sizes == [2, 2], "two at a time, without the one that has no frames"
    assert together.dtype == torch.float32 and together.shape == (5, 48) and not together[1].any()
    for i in (0, 2, 3, 4):
        torch.testing.assert_close(together[i], tiny([films[i]])[0], atol=1e-6, rtol=1e-5)
    assert torch.equal(together, encoder_of()(films)), "random, but always the same"


@pytest.mark.parametrize("change", [{"frames": 8}, {"image_size": 48}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_every_key_of_the_encoder_counts(tiny, change):
    frames = film(11)
    other = encoder_of(**change)([frames])
    assert other.dtype == torch.float32
    assert (other - tiny([frames])).abs().max() > 1e-4


def test_size_follows_the_checkpoint_and_odd_sizes_are_refused():
    assert encoder_of(image_size=None).size == 64
    with pytest.raises(EncoderError, match="algorithm.frames is 5; encoder tiny takes multiples of 2"):
        encoder_of(frames=5)
    with pytest.raises(EncoderError, match="algorithm.image_size is 40; encoder tiny takes multiples of 16"):
        encoder_of(image_size=40)


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        ({"crop_size": 256}, 304),  # ViT-L
        ({"hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 22, "mlp_ratio": 48 / 11,
          "crop_size": 384}, 1012),  # ViT-g
    ],
)  # fmt: skip
def test_the_published_sizes(config, millions):
    """On the meta device: parameters of the encoder, and one token a 2 x 16 x 16 block of 64 frames."""
    with torch.device("meta"):
        model = VJEPA2Model(VJEPA2Config(**config))
        size, width = model.config.crop_size, model.config.hidden_size
        tokens = model.get_vision_features(torch.zeros(1, 64, 3, size, size))
    assert sum(p.numel() for p in model.encoder.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert tokens.shape == (1, 32 * (size // 16) ** 2, width)


def test_a_folder_in_the_hubs_layout_loads(checkpoint, capfd):
    check_encoder(EncoderSettings(encoder=str(checkpoint)))
    capfd.readouterr()
    loaded = encoder_of(checkpoint, image_size=None)
    assert capfd.readouterr() == ("", ""), "a log has no progress bars"
    original = VJEPA2Model.from_pretrained(checkpoint)
    with torch.no_grad():
        tokens = original.get_vision_features(preprocess_frames(film(4), 32, "cpu")[None])
    torch.testing.assert_close(loaded([film(4)])[0], tokens.mean(1)[0])
    assert loaded.width == 24 and not any(p.requires_grad for p in loaded.model.parameters())


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "vitg-384.pt").write_bytes(b"0")
    remedy = r"(.*\n)*.*hf download facebook/vjepa2-vitg-fpc64-384 --local-dir FOLDER"
    for name, problem in (
        (tmp_path / "none", "is neither a folder .*/none"),
        (tmp_path / "vitg-384.pt", "is neither a folder .*/vitg-384.pt"),
        ("tinny", "'tinny' is neither a folder"),
        (tmp_path / "empty", "folder .*/empty gave no V-JEPA 2 checkpoint"),
        ("no-owner/vjepa2", "no-owner/vjepa2 of the hub, or the hub's cache, gave no V-JEPA 2 checkpoint"),
    ):
        with pytest.raises(EncoderError, match=problem + remedy):
            check_encoder(EncoderSettings(encoder=str(name)))


def test_another_model_or_a_damaged_one_is_refused(checkpoint):
    from safetensors.torch import load_file, save_file

    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    del tensors["encoder.layer.0.mlp.fc1.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(EncoderError, match=r"lacks 1 tensors of the encoder, such as encoder\.layer\.0\.mlp\.fc1"):
        load_model(str(checkpoint), "cpu")
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(EncoderError, match="the weights of .* cannot be read"):
        load_model(str(checkpoint), "cpu")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(EncoderError, match="is a 'llama' model, and no V-JEPA 2"):
        check_encoder(EncoderSettings(encoder=str(checkpoint)))
