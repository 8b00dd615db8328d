"""Measures what our models and servers do to images, numbers and frames. Only the parts that convert are built."""

# ruff: noqa: SLF001 - what a policy makes of an observation has no public name

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

Array = npt.NDArray[Any]
SIDE = 64
"""Side of the network's image."""
CPU = torch.device("cpu")
SENTENCE = " Pick_up the RED cube. "
"""An instruction with capitals, an underscore, a full stop, and white space at both ends."""
Process = Callable[[Array], Tensor]
"""Images uint8 [B, H, W, 3] -> the network's input [B, 3, S, S] or more channels."""


def list_processors() -> dict[str, tuple[Process, tuple[int, int]]]:
    """Return model -> how it processes images, and the height and width of those it is tried with."""
    from vla_rl.plugins.models.film_resnet.builder import to_pixels
    from vla_rl.plugins.models.gr00t.builder import AreaImages
    from vla_rl.plugins.models.openvla.architecture import preset_config
    from vla_rl.plugins.models.openvla.base import OpenVLAImageProcessor
    from vla_rl.plugins.models.smolvla.builder import CornerImages as SmolVLAImages
    from vla_rl.toolkit.models.images import CroppedImages, ImageProcessor

    def use_tower(processor: Any) -> Process:
        return lambda images: processor([images]).flatten(1, 2)

    def use_openvla(center_crop: bool) -> Process:
        processor = OpenVLAImageProcessor(preset_config("fast"), CPU, torch.float32, center_crop=center_crop)
        return lambda images: processor([images])

    wide, square = (96, 128), (96, 96)
    tower = SIDE, CPU, torch.float32
    return {
        "openvla": (use_openvla(False), wide),
        "openvla, center_crop": (use_openvla(True), wide),
        "pi0, pi05": (use_tower(ImageProcessor(*tower)), wide),
        "smolvla": (use_tower(SmolVLAImages(*tower)), wide),
        "gr00t N1.5": (use_tower(CroppedImages(*tower)), wide),
        "gr00t N1.7": (use_tower(AreaImages(*tower, crop=0.95)), square),
        "film_resnet": (lambda images: to_pixels(images, SIDE, CPU, torch.float32), wide),
    }


def measure_range(process: Process, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Return what black and white become, by channel."""
    images = np.stack([np.full((*shape, 3), level, np.uint8) for level in (0, 255)])
    middle = SIDE // 2
    black, white = process(images)[:, :, middle, middle].double().numpy()
    return black, white


def measure_normalisation(process: Process, shape: tuple[int, int]) -> str:
    """Return the range of levels, or the mean and deviation of each group of three channels."""
    black, white = measure_range(process, shape)
    if np.allclose(black, -1, atol=1e-5) and np.allclose(white, 1, atol=1e-5) and len(black) == 3:
        return "[-1, 1]"
    deviation = 1 / (white - black)
    groups = []
    for first in range(0, len(black), 3):
        mean, spread = -black[first : first + 3] * deviation[first : first + 3], deviation[first : first + 3]
        groups.append(f"mean {join_numbers(mean)}, std {join_numbers(spread)}")
    return "; ".join(groups)


def join_numbers(values: Array) -> str:
    texts = [f"{value:.3g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def measure_crop(process: Process, shape: tuple[int, int]) -> str:
    """Return which part of each side is seen, found on a ramp of brightness, in steps of 1 %."""
    height = width = shape[0]
    ramp = np.repeat(np.linspace(16, 240, width)[None, :], height, 0)
    images = np.repeat(ramp[None, :, :, None], 3, 3).round().astype(np.uint8)
    black, white = measure_range(process, (height, width))
    line = ((process(images)[0, 0, SIDE // 2].double().numpy() - black[0]) / (white[0] - black[0]) * 255 - 16) / 224
    inside = line[4:-4]  # away from the edges, where filters see fewer pixels
    slope = np.polyfit(np.arange(len(inside)), inside, 1)[0]
    seen = slope * SIDE * (width - 1) / width
    return "none" if seen > 0.99 else f"the middle {seen:.2f} of each side"


def list_geometries(images: Array) -> Iterator[tuple[str, Array, tuple[int, int], tuple[int, int], float]]:
    """Yield the ways to fit a frame into a square: name, what is scaled, its size then, where it is put, and the level
    around it."""
    height, width = images.shape[:2]
    ratio = max(height, width) / SIDE
    inner = int(height / ratio), int(width / ratio)
    yield "stretched", images, (SIDE, SIDE), (0, 0), 0.0
    if height != width:
        centre = (SIDE - inner[0]) // 2, (SIDE - inner[1]) // 2
        yield "aspect kept, black around", images, inner, centre, 0.0
        yield "aspect kept, black on the left and top", images, inner, (SIDE - inner[0], SIDE - inner[1]), 0.0
        yield "aspect kept, grey on the right and bottom", images, inner, (0, 0), 127.5
    high, wide = int(height * 0.95), int(width * 0.95)
    top, left = round((height - high) / 2), round((width - wide) / 2)
    yield "stretched", images[top : top + high, left : left + wide], (SIDE, SIDE), (0, 0), 0.0


def resize_by_pillow(kind: Image.Resampling) -> Callable[[Array, tuple[int, int]], Array]:
    def resize(image: Array, size: tuple[int, int]) -> Array:
        across = Image.fromarray(np.ascontiguousarray(image)).resize((size[1], image.shape[0]), kind)
        return np.asarray(across.resize(size[::-1], kind)).astype(np.float64)

    return resize


def resize_by_torch(mode: str, antialias: bool, finish: str) -> Callable[[Array, tuple[int, int]], Array]:
    def resize(image: Array, size: tuple[int, int]) -> Array:
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()
        scaled = F.interpolate(pixels, size, mode=mode, antialias=antialias)[0].permute(1, 2, 0).double().numpy()
        return {"": scaled, ", truncated": np.floor(scaled.clip(0, 255)), ", rounded": np.rint(scaled)}[finish]

    return resize


def resize_by_area(image: Array, size: tuple[int, int]) -> Array:
    """Scale to the square, crop its middle 0.95 and scale again, as GR00T N1.7 does."""
    import cv2

    square = cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=cv2.INTER_AREA)
    high, wide = (int(side * 0.95) for side in size)
    top, left = (size[0] - high) // 2, (size[1] - wide) // 2
    middle = np.ascontiguousarray(square[top : top + high, left : left + wide])
    return cv2.resize(middle, size[::-1], interpolation=cv2.INTER_AREA).astype(np.float64)


def sample_crop(image: Array, size: tuple[int, int]) -> Array:
    """Take the middle 0.9 of the area at a square's pixels, bilinear without antialiasing, as TensorFlow's
    crop_and_resize does."""
    height, width = image.shape[:2]
    rows, columns = (
        (side - 1) / 2 + np.linspace(-1, 1, count) * np.sqrt(0.9) * (side - 1) / 2
        for side, count in zip((height, width), size, strict=True)
    )
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    y, x = (rows - top)[:, None, None], (columns - left)[None, :, None]
    pixels = image.astype(np.float64)
    one, other = (pixels[row][:, left] * (1 - x) + pixels[row][:, left + 1] * x for row in (top, top + 1))
    return np.floor((one * (1 - y) + other * y) / 255 * 255.5)


def list_filters() -> dict[str, Callable[[Array, tuple[int, int]], Array]]:
    filters = {f"Pillow {kind.name.lower()}": resize_by_pillow(kind) for kind in Image.Resampling}
    for finish in ("", ", truncated", ", rounded"):
        filters[f"torch bilinear{finish}"] = resize_by_torch("bilinear", False, finish)
        filters[f"torch bilinear antialiased{finish}"] = resize_by_torch("bilinear", True, finish)
        filters[f"torch bicubic antialiased{finish}"] = resize_by_torch("bicubic", True, finish)
    filters["OpenCV INTER_AREA, twice with a crop between"] = resize_by_area
    filters["torch grid_sample, truncated"] = sample_crop
    return filters


def measure_resize(process: Process, shape: tuple[int, int]) -> str:
    """Return the fit and the filter that come nearest to a model's, and by how many levels they differ at most."""
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    black, white = measure_range(process, shape)
    output = process(image[None])[0, :3].permute(1, 2, 0).double().numpy()
    levels = (output - black[:3]) / (white[:3] - black[:3]) * 255
    found = {}
    for geometry, scaled, size, (top, left), level in list_geometries(image):
        for name, resize in list_filters().items():
            whole = np.full((SIDE, SIDE, 3), level)
            whole[top : top + size[0], left : left + size[1]] = resize(scaled, size)
            text = f"{geometry}, {name}"
            gaps = np.abs(whole - levels)
            found[text] = min((gaps.mean(), gaps.max()), found.get(text, (np.inf, np.inf)))
    best = min(found, key=lambda text: found[text])
    mean, most = found[best]
    if mean > 0.2:
        return f"none of those that are tried ({best} is nearest)"
    return f"{best}, {'to the bit' if most < 0.01 else f'within {most:.1f} levels'}"


def measure_scale(mode: str) -> str:
    """Return what the network's numbers mean in the simulator's units, and that they keep their order."""
    from vla_rl.toolkit.models.checkpoints.lerobot import MODES, FeatureScale
    from vla_rl.toolkit.models.scaling import FeatureScaler

    names = MODES[mode]
    scaler = FeatureScaler(FeatureScale(mode=mode, values=((10.0, 20.0), (14.0, 26.0)), dim=2), CPU, torch.float64)
    given = (-1.0, 1.0) if mode != "MEAN_STD" else (0.0, 1.0)
    low, high = (scaler.restore_units(torch.full((2,), value, dtype=torch.float64)).tolist() for value in given)
    means = {10.0: names[0], 14.0: f"{names[0]} + {names[1]}" if mode == "MEAN_STD" else names[1]}
    assert np.allclose(low, [10.0, 20.0]), low
    assert np.allclose(high, [14.0, 26.0] if mode != "MEAN_STD" else [24.0, 46.0]), high
    return f"{given[0]:g} is {names[0]}, {given[1]:g} is {means[14.0]}"


def measure_openvla_scale() -> str:
    """Return what the ends of a token's range mean."""
    from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScale

    scale = ActionScale(q01=(10.0, 20.0), q99=(14.0, 26.0), mask=(True, True))
    codec = ActionCodec(scale, vocab_end=1000, bins=256, device=CPU)
    ends = codec.decode_tokens(torch.tensor([[999, 999], [744, 744]])).tolist()
    step = 2 / 255 / 2 / 2
    assert np.allclose(ends, [[10 + 4 * step, 20 + 6 * step], [14 - 4 * step, 26 - 6 * step]], atol=1e-3), ends
    return "the highest token id is q01, the lowest q99"


def measure_gripper(restore: Callable[[Tensor], Tensor]) -> str:
    """Return what the simulator gets for a gripper of 0 and of 1."""
    actions = torch.zeros(2, 3, dtype=torch.float64)
    actions[1, -1] = 1.0
    zero, one = restore(actions)[:, -1].tolist()
    return f"0 -> {zero:+g}, 1 -> {one:+g}"


def list_grippers() -> dict[str, Callable[[Tensor], Tensor]]:
    from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScale
    from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale
    from vla_rl.toolkit.models.scaling import FeatureScaler, GripperScaler

    def use_codec(gripper: str) -> Callable[[Tensor], Tensor]:
        return ActionCodec(ActionScale.identity_scale(3), 1000, 256, CPU, gripper=gripper).restore_actions

    plain = FeatureScale(mode="IDENTITY", values=(), dim=3)
    return {
        "openvla, gripper: rlds": use_codec("rlds"),
        "openvla, gripper: widowx": use_codec("widowx"),
        "openvla, gripper: keep": use_codec("keep"),
        "pi0, pi05": FeatureScaler(plain, CPU, torch.float64).restore_units,
        "smolvla": FeatureScaler(plain, CPU, torch.float64).restore_units,
        "gr00t, gripper: libero": GripperScaler(plain, 1, CPU).restore_units,
        "gr00t, gripper: as_is": FeatureScaler(plain, CPU, torch.float64).restore_units,
    }


def measure_messages() -> dict[str, tuple[str, str]]:
    """Return dialect -> keys of a request and of an answer, and how many actions an answer has."""
    from vla_rl.core.types import EnvInfo
    from vla_rl.serving.dialects import DIALECTS
    from vla_rl.toolkit.models.acting.openpi import unpack_frame

    info = EnvInfo(
        cameras={"front": (64, 64), "wrist": (64, 64)}, state_dim=8, action_low=(-1.0,), action_high=(1.0,), tasks=()
    )
    texts = {}
    for name, kind in DIALECTS.items():
        keys = kind.default_keys(info)
        dialect = kind(about={}, keys=keys, info=info)
        answer = unpack_frame(dialect.encode_answer(np.zeros((5, 1), np.float32), {"infer_ms": 1.0}))
        request = ", ".join([*keys.camera_keys(info).values(), *keys.state, keys.instruction])
        actions = answer["payload"]["actions"] if "payload" in answer else answer["actions"]
        played = f"{len(actions)} of 5" if actions.ndim > 1 else "1 of 5, the rest kept for the next requests"
        texts[name] = f"{request} -> {', '.join(answer)}", played
    return texts


def measure_sentences() -> dict[str, str]:
    """Return model -> the text that its tokenizer gets for SENTENCE, without images."""
    from vla_rl.plugins.models.gr00t.builder import ChatPrompts
    from vla_rl.plugins.models.openvla import prompts as openvla
    from vla_rl.plugins.models.pi0 import builder as pi0
    from vla_rl.plugins.models.smolvla import builder as smolvla

    letters = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=list(text)))
    chat = SimpleNamespace(tokenizer=letters, image_token="", _formal=True, _words=1000, _before=[], _after=[])
    formal, empty = ("".join(map(str, ChatPrompts.prompt_ids(chat, text))) for text in (SENTENCE, ""))  # type: ignore[arg-type]
    return {
        "openvla": repr(openvla.prompt_text(SENTENCE)),
        "pi0": repr(pi0.prompt_text(SENTENCE)),
        "pi0 in lerobot": repr(pi0.prompt_text(SENTENCE)),
        "pi05 in lerobot": repr(pi0.state_text(SENTENCE, [128, 128])),
        "smolvla": repr(smolvla.prompt_text(SENTENCE)),
        "gr00t N1.7": f"{formal!r}; no instruction: {empty!r}",
    }


def measure_camera_order() -> dict[str, str]:
    """Return model -> in which order it sees cameras, whatever the order of an observation's."""
    from vla_rl.core.types import EnvInfo, Observation
    from vla_rl.plugins.models.film_resnet.builder import FilmPolicy
    from vla_rl.plugins.models.openvla.base import FamilyPolicy
    from vla_rl.toolkit.models.checkpoints.fitting import choose_cameras
    from vla_rl.toolkit.models.flow.inputs import FlowInputs

    env = EnvInfo(cameras={"a": (8, 8), "b": (8, 8)}, state_dim=0, action_low=(-1.0,), action_high=(1.0,), tasks=())
    trained, others = (choose_cameras("", env, None, names, tuple(env.cameras)) for names in (("b", "a"), ("x", "y")))
    chosen = {("b", "a"): "that of training where its names are the simulator's", ("a", "b"): "the simulator's"}
    obs = Observation(
        images={name: np.full((1, 8, 8, 3), at, np.uint8) for at, name in enumerate("abc")}, instructions=("go",)
    )
    seen: list[Array] = []
    usual: dict[str, Any] = {"_device": CPU, "_cameras": trained, "_dtype": torch.float32, "_state": None}

    def record(cameras: Any) -> Tensor:
        seen[:] = [np.asarray(images) for images in cameras]
        return torch.zeros(1)

    def run_openvla() -> None:
        FamilyPolicy._prepare_images(SimpleNamespace(**usual, images=record, _parts=SimpleNamespace(reuse=False)), obs)  # type: ignore[arg-type]

    def run_flow() -> None:
        parts = {"_read_state": lambda obs: None, "_encode_prompts": lambda obs, state: (None, None)}
        process = lambda cameras, state: (record(cameras), torch.zeros(1))  # noqa: E731
        FlowInputs._build_inputs(SimpleNamespace(**usual, **parts, _process_inputs=process), obs)  # type: ignore[arg-type]

    def run_film() -> None:
        setup = SimpleNamespace(cameras=trained, network=SimpleNamespace(image_size=8))
        policy = SimpleNamespace(**usual, setup=setup, _words=lambda texts: torch.zeros(1))
        record(FilmPolicy._prepare_inputs(policy, obs)[0])  # type: ignore[arg-type]

    texts = {}
    runs = {"openvla_oft": run_openvla, "pi0, pi05": run_flow, "film_resnet": run_film}
    for model, run in runs.items():
        run()
        levels = np.array([images.mean() for images in seen])
        order = tuple("ab"[at] for at in levels.argsort().argsort())
        texts[model] = f"{chosen.get(order, 'another')}, else {chosen[others]}"
    return texts | dict.fromkeys(("pi0, pi05 in lerobot", "smolvla", "gr00t"), texts["pi0, pi05"])


def measure_models() -> Mapping[tuple[str, str], str]:
    """Return (subject, model or server) -> what ours does."""
    texts: dict[tuple[str, str], str] = {}
    for name, (process, shape) in list_processors().items():
        texts["resize", name] = measure_resize(process, shape)
        texts["crop", name] = measure_crop(process, shape)
        texts["normalisation", name] = measure_normalisation(process, shape)
        for loader in ("pi0, pi05 in lerobot", "pi0 in transformers") if name == "pi0, pi05" else ():
            texts |= {(subject, loader): texts[subject, name] for subject in ("resize", "crop", "normalisation")}
    texts |= {("sentence", name): text for name, text in measure_sentences().items()}
    texts |= {("order of cameras", name): text for name, text in measure_camera_order().items()}
    for name, restore in list_grippers().items():
        texts["gripper", name] = measure_gripper(restore)
    texts["action order and bounds", "openvla"] = measure_openvla_scale()
    scales = {"pi0": "MEAN_STD", "pi05": "QUANTILES", "smolvla": "MEAN_STD", "gr00t": "MIN_MAX"}
    for name, mode in scales.items():
        texts["action order and bounds", name] = measure_scale(mode)
    texts["action order and bounds", "pi0, pi05 in lerobot"] = measure_scale("QUANTILES") + " (QUANTILES)"
    for name, (message, played) in measure_messages().items():
        texts["message", name], texts["executed steps", name] = message, played
    return texts
