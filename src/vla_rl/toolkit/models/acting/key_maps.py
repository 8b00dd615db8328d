"""Key maps of inference requests: the keys of cameras, state and instruction; for some robots with openpi's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import field, frozen
from attrs.validators import in_

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import read_text
from vla_rl.core.spec.yaml import parse_yaml
from vla_rl.core.types import Array, EnvInfo, Observation
from vla_rl.toolkit.images import resized
from vla_rl.toolkit.models.acting.openpi import EncodedImage, check_pixels

LONGEST_TEXT = 8192
"""Most bytes of an instruction that are read: more than any policy takes."""
ACTION_SPACES = ("joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity")


@frozen(kw_only=True)
class KeyMap:
    """Keys of a request. One may name an entry of a map: `images/cam_high` is looked up as it is, then in `images`."""

    images: Mapping[str, str] | Sequence[str]
    """Camera of the policy -> key of a request; or keys alone, for the policy's cameras in their order."""
    state: Sequence[str] = ()
    """Keys whose numbers, concatenated, are the state."""
    state_sizes: Sequence[int] = ()
    """Number of elements of each state key, for clients; not needed for a single key."""
    instruction: str = "prompt"
    """Key of the instruction."""
    rotate_180: bool = False
    """Clients send images upside down, and the server turns them."""
    resize: bool = False
    """Images of any size are scaled to the training size; false: others are refused."""
    channels_first: bool = False
    """Clients send [3, H, W], as ALOHA's do. Servers detect it."""
    action_space: str = field(default="joint_position", validator=in_(ACTION_SPACES))
    """Meaning of actions, for RoboArena's clients."""

    def camera_keys(self, info: EnvInfo) -> dict[str, str]:
        """Return camera -> key for each camera of the policy. Raise UserError if one has none."""
        if isinstance(self.images, Mapping):
            key_of = {camera: self.images[camera] for camera in info.cameras if camera in self.images}
        else:
            key_of = dict(zip(info.cameras, self.images, strict=False))
        if unmapped := [camera for camera in info.cameras if camera not in key_of]:
            raise UserError(
                f"the key map has no key for camera {', '.join(map(repr, unmapped))} of the policy; write one as YAML, "
                f"`images: {{CAMERA: KEY}}`, for {', '.join(info.cameras)}"
            )
        return key_of


PRESETS: Mapping[str, KeyMap] = {
    "libero": KeyMap(images=("observation/image", "observation/wrist_image"), state=("observation/state",)),
    "droid": KeyMap(
        images=("observation/exterior_image_1_left", "observation/wrist_image_left"),
        state=("observation/joint_position", "observation/gripper_position"),
        state_sizes=(7, 1),
    ),
    "aloha": KeyMap(
        images=("images/cam_high", "images/cam_left_wrist", "images/cam_right_wrist", "images/cam_low"),
        state=("state",),
        channels_first=True,
    ),
}


def default_key_map(info: EnvInfo) -> KeyMap:
    """Return the key map of policies for any robot: `observation/CAMERA`, `observation/state`, `prompt`."""
    return KeyMap(
        images={camera: f"observation/{camera}" for camera in info.cameras},
        state=("observation/state",) if info.state_dim else (),
    )


def read_key_map(name: str) -> KeyMap:
    """Return a preset, or the key map in a YAML file. Raise UserError."""
    if name in PRESETS:
        return PRESETS[name]
    file = Path(name)
    if not file.is_file():
        suggestion = did_you_mean(name, PRESETS)
        raise UserError(f"{name!r} is neither a file nor one of the key maps {', '.join(PRESETS)}{suggestion}")
    try:
        document = parse_yaml(read_text(file))
        for error in document.errors:
            raise UserError(f"{file}:{error.line}: {error.message}")
        data = document.data
        known = {key.name for key in attrs.fields(KeyMap)}
        if not isinstance(data, dict) or not data.keys() <= known:
            raise UserError(f"{file}: a key map has the keys {', '.join(sorted(known))}")
        if isinstance(data.get("state"), str):
            data["state"] = [data["state"]]
        return KeyMap(**data)
    except (OSError, UnicodeDecodeError, TypeError, ValueError) as exc:
        raise UserError(f"{file} is not a key map: {exc}") from exc


def read_request(keys: KeyMap, info: EnvInfo, request: Mapping[Any, Any]) -> tuple[dict[str, Array], Any, str | None]:
    """Return the images, state and instruction of a request (None: it has no instruction), for `Policy.observation`.
    Keys that the policy does not need are not decoded. Raise FrameError, or UserError that lists what is expected."""
    wanted = keys.camera_keys(info)
    missing = [key for key in (*wanted.values(), *keys.state) if _find_entry(request, key) is None]
    if missing:
        present = ", ".join(repr(key[:100]) for key in list(request)[:20]) or "nothing"
        raise UserError(
            f"the request lacks {', '.join(map(repr, missing))}; it has {present[:500]}; wanted are images "
            f"{', '.join(map(repr, wanted.values()))}, state {', '.join(map(repr, keys.state)) or 'none'} "
            f"({info.state_dim} numbers), instruction {keys.instruction!r}"
        )
    raw_images = {camera: _find_entry(request, key) for camera, key in wanted.items()}
    if keys.resize:  # without resizing, their sizes are known
        check_pixels(image for image in raw_images.values() if isinstance(image, EncodedImage))
    images = {
        camera: _convert_image(image, wanted[camera], keys, info.cameras[camera])
        for camera, image in raw_images.items()
    }
    text = _find_entry(request, keys.instruction)
    if isinstance(text, bytes):
        text = text[:LONGEST_TEXT].decode("utf-8", "replace")
    state = _join_state([_find_entry(request, key) for key in keys.state], info.state_dim) if keys.state else None
    return images, state, text


def has_encoded(keys: KeyMap, info: EnvInfo, request: Mapping[Any, Any]) -> bool:
    """Return whether one of the needed images is compressed, so that reading the request takes long."""
    return any(isinstance(_find_entry(request, key), EncodedImage) for key in keys.camera_keys(info).values())


def write_request(keys: KeyMap, info: EnvInfo, obs: Observation, row: int) -> dict[str, Any]:
    """Build the request for one sample of observations in host memory. Raise UserError if the state cannot be split."""
    request: dict[str, Any] = {}
    for camera, key in keys.camera_keys(info).items():
        image = np.asarray(obs.images[camera][row])
        image = image[::-1, ::-1] if keys.rotate_180 else image
        _put_entry(request, key, np.ascontiguousarray(image.transpose(2, 0, 1) if keys.channels_first else image))
    if keys.state and obs.state is not None:
        sizes = tuple(keys.state_sizes) or (info.state_dim,)
        if len(sizes) != len(keys.state) or sum(sizes) != info.state_dim:
            raise UserError(
                f"the simulator's state has {info.state_dim} numbers, and the key map says {list(sizes)} for "
                f"{', '.join(map(repr, keys.state))}; give a YAML file with the right `state_sizes`"
            )
        parts = np.split(np.asarray(obs.state[row]), np.cumsum(sizes)[:-1])
        for key, part in zip(keys.state, parts, strict=True):
            _put_entry(request, key, part)
    request[keys.instruction] = obs.instructions[row]
    return request


def _find_entry(request: Mapping[Any, Any], key: str) -> Any:
    if key in request:
        return request[key]
    first, slash, remainder = key.partition("/")
    within = request.get(first) if slash else None
    return _find_entry(within, remainder) if isinstance(within, Mapping) else None


def _put_entry(request: dict[str, Any], key: str, value: Any) -> None:
    """Put a value into the request. openpi's names of LIBERO and DROID have slashes; only ALOHA's images are a map."""
    first, _, remainder = key.partition("/")
    if first == "images" and remainder:
        request.setdefault(first, {})[remainder] = value
    else:
        request[key] = value


def _convert_image(image: Any, key: str, keys: KeyMap, size: tuple[int, int]) -> Array:
    """Convert an image (PNG, JPEG, floats in 0 ... 1, channels first) to uint8 [H, W, 3]; its size is checked first."""
    if isinstance(image, EncodedImage):
        _check_size(image.size, key, keys, size)
        image = image.decode()
    if not isinstance(image, np.ndarray) or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
        shape = list(image.shape) if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(f"{key!r} is {shape}; an image is [height, width, 3] or [3, height, width]")
    if image.shape[2] != 3:
        image = image.transpose(1, 2, 0)
    _check_size(image.shape[:2], key, keys, size)
    if image.dtype.kind == "f":
        if not (np.isfinite(image).all() and image.min(initial=0) >= 0 and image.max(initial=0) <= 1):
            raise UserError(f"{key!r} is of floats that are not within 0 and 1; send uint8 within 0 and 255")
        image = (image * 255).round().astype(np.uint8)
    if image.dtype != np.uint8:
        raise UserError(f"{key!r} is of {image.dtype}; send uint8 within 0 and 255")
    if image.shape[:2] != size:
        image = resized(image, size)
    upright: Array = image[::-1, ::-1] if keys.rotate_180 else image
    return upright


def _check_size(given: tuple[int, ...], key: str, keys: KeyMap, size: tuple[int, int]) -> None:
    if given == size or (keys.resize and 0 not in given):
        return
    raise UserError(
        f"{key!r} is {list(given)} (height, width); the policy was trained on {list(size)}: send that, "
        f"or let the server scale it (`resize: true` in its key map, --resize)"
    )


def _join_state(parts: Sequence[Any], length: int) -> Any:
    """Return the parts as float32 [S] if they are numbers; else as they are, for `Policy.observation` to refuse."""
    numbers = sum(part.size for part in parts if isinstance(part, np.ndarray))
    if numbers > length:  # refused before they are copied
        raise UserError(f"the state has the shape [{numbers}]; it must be {length} numbers")
    try:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is refused later
            return np.concatenate([np.asarray(part, np.float32).reshape(-1) for part in parts])
    except (TypeError, ValueError):
        return parts
