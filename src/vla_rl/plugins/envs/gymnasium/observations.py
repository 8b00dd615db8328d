"""What a policy sees of a gymnasium environment: images by camera and the joined state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import evolve
from gymnasium import spaces

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.gymnasium.config import LEROBOT, CameraSettings, GymnasiumConfig
from vla_rl.plugins.envs.gymnasium.entries import NoEntry, find_entry
from vla_rl.toolkit.images import resized

WHOLE = "observation"
RENDER = "render"
PIXELS, AGENT_POS = "pixels", "agent_pos"
"""Entries of an observation that lerobot turns into images and state (`preprocess_observation`)."""
ONE_IMAGE = "image"
"""Name of the camera where `pixels` is one image, as in lerobot's `observation.image`."""
IMAGE_FORMATS = "[height, width, 3] or [3, height, width], of uint8, or of floats from 0 to 1 or to 255"


def uses_render(config: GymnasiumConfig) -> bool:
    """Return whether a camera shows what `render()` returns."""
    if not config.cameras:
        return not config.id.startswith(LEROBOT)
    return any(_of_render(camera) for camera in config.cameras.values())


def fill_cameras(config: GymnasiumConfig, space: Any) -> GymnasiumConfig:
    """Return the settings with cameras where they have none: `render()` as `main`; for environments of lerobot the
    images that it reads from an observation, in their own size, and the state if none is given either. Raise UserError
    for an environment of lerobot that observes no image."""
    if config.cameras:
        return config
    if not config.id.startswith(LEROBOT):
        return evolve(config, cameras={"main": CameraSettings()})
    entries = space.spaces if isinstance(space, spaces.Dict) else {}
    if PIXELS not in entries:
        raise UserError(
            f"{config.id} observes no image, and a policy here sees images: {PIXELS!r} is not an entry of {space}\n"
            "  give the setting that adds it in kwargs, such as image_obs: true or obs_type: pixels_agent_pos, or name "
            "another image in cameras.NAME.source, such as `render`"
        )
    pixels = entries[PIXELS]
    images = pixels.spaces if isinstance(pixels, spaces.Dict) else {ONE_IMAGE: pixels}
    cameras = {}
    for name, image in images.items():
        source = f"{PIXELS}.{name}" if isinstance(pixels, spaces.Dict) else PIXELS
        cameras[name] = CameraSettings(source=source)
        if image.shape is not None and len(image.shape) == 3:  # `check_cameras` refuses others
            height, width = image.shape[:2] if image.shape[-1] == 3 else image.shape[1:]
            cameras[name] = CameraSettings(source=source, size=(height, width))
    state = AGENT_POS if config.state is None and AGENT_POS in entries else config.state
    return evolve(config, cameras=cameras, state=state)


def check_cameras(space: Any, config: GymnasiumConfig) -> None:
    """Raise UserError for a camera whose source is not an image of the observation space. What `render()` returns is
    known only when it is called."""
    for name, camera in config.cameras.items():
        if not _of_render(camera):
            setting = f"cameras.{name}.source"
            source = _select_entry(space, camera.source, setting, config.id)
            if not (isinstance(source, spaces.Box) and _is_image(source.dtype, source.shape)):
                raise UserError(
                    f"{setting} {camera.source!r} of {config.id} is {source}, not an image: {IMAGE_FORMATS}"
                )


def state_sizes(space: Any, config: GymnasiumConfig) -> dict[str, int]:
    """Return the paths of the state's parts in their order -> how many numbers each has. Raise UserError for a part
    that is not a vector of numbers."""
    sizes = {}
    for path in state_paths(config):
        part = _select_entry(space, path, "state", config.id)
        if not isinstance(part, spaces.Box) or len(part.shape) > 1:
            raise UserError(f"state {path!r} of {config.id} is {part}; a state is a Box of one dimension, or a number")
        sizes[path] = part.shape[0] if part.shape else 1
    return sizes


def state_paths(config: GymnasiumConfig) -> tuple[str, ...]:
    if config.state is None:
        return ()
    return (config.state,) if isinstance(config.state, str) else config.state


def read_images(
    observation: Any, space: Any, render: Callable[[], Any], config: GymnasiumConfig
) -> Mapping[str, Array]:
    """Return the images of all cameras, uint8 [H, W, 3], upright, in the settings' size, with one `render` at most."""
    rendered = render() if uses_render(config) else None
    images = {}
    for name, camera in config.cameras.items():
        where = f"{camera.source} of {config.id}"
        if _of_render(camera):
            image, highest = _part_of_render(rendered, camera, name, config.id), None
        else:
            image = _select_entry(observation, camera.source, f"cameras.{name}.source", config.id)
            highest = _select_entry(space, camera.source, f"cameras.{name}.source", config.id).high.max()
        images[name] = resized(np.rot90(to_rgb(image, where, highest), camera.turn // 90), camera.image_shape)
    return images


def read_state(observation: Any, sizes: Mapping[str, int], env_id: str) -> Array | None:
    """Return the state float32 [S], its parts joined; None without any. Raise UserError for a part of a new length."""
    if not sizes:
        return None
    parts = []
    for path, size in sizes.items():
        numbers = np.asarray(_select_entry(observation, path, "state", env_id), np.float32).reshape(-1)
        if len(numbers) != size:
            raise UserError(
                f"state {path!r} of {env_id} has {len(numbers)} numbers now, and its space says {size}; a policy needs "
                "states of one length: choose other entries, or add a wrapper that pads"
            )
        parts.append(numbers)
    return np.concatenate(parts)


def to_rgb(image: Any, source: str, highest: float | None = None) -> Array:
    """Return an image as uint8 [H, W, 3]. `highest`: upper bound of floats by the image's space; None: 1. Raise
    UserError for anything but an RGB image, and for floats out of their range."""
    if not isinstance(image, np.ndarray) or not _is_image(image.dtype, image.shape):
        got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(f"{source} gave {got}, not an image: {IMAGE_FORMATS}")
    pixels: Array = image if image.shape[-1] == 3 else np.moveaxis(image, 0, -1)
    if pixels.dtype == np.uint8:
        return pixels
    scale = 255.0 if highest is None or highest <= 1 else 1.0
    scaled = pixels * scale
    low, high = float(pixels.min()), float(pixels.max())
    if not (low * scale >= -1e-3 and high * scale <= 255 + 1e-3):  # false for NaN too
        raise UserError(
            f"{source} gave floats from {low:g} to {high:g}; an image of floats has numbers from 0 to {255 / scale:g}"
        )
    rounded: Array = np.rint(scaled).clip(0, 255).astype(np.uint8)
    return rounded


def _is_image(dtype: Any, shape: tuple[int, ...]) -> bool:
    return (dtype == np.uint8 or dtype.kind == "f") and len(shape) == 3 and 3 in (shape[0], shape[-1])


def _of_render(camera: CameraSettings) -> bool:
    return camera.source == RENDER or camera.source.startswith(f"{RENDER}.")


def _part_of_render(rendered: Any, camera: CameraSettings, name: str, env_id: str) -> Any:
    if camera.source != RENDER:
        return _named_entry(rendered, camera.source.removeprefix(f"{RENDER}."), f"cameras.{name}.source", env_id)
    if isinstance(rendered, list | tuple | Mapping):
        keys = list(rendered) if isinstance(rendered, Mapping) else range(len(rendered))
        sources = ", ".join(f"render.{key}" for key in keys)
        raise UserError(f"cameras.{name}.source: render() of {env_id} gives several images; choose one of {sources}")
    return rendered


def _select_entry(container: Any, path: str, setting: str, env_id: str) -> Any:
    """Return an entry of an observation or of its space; `observation` is all of one that is not a dict."""
    if isinstance(container, spaces.Dict | Mapping):
        return _named_entry(container, path, setting, env_id)
    if path != WHOLE:
        description = container if isinstance(container, spaces.Space) else type(container).__name__
        raise UserError(
            f"{setting}: {env_id} observes {description}, without entries such as {path!r}; give `observation` for all "
            "of it"
        )
    return container


def _named_entry(container: Any, path: str, setting: str, env_id: str) -> Any:
    try:
        return find_entry(container, path)
    except NoEntry as exc:
        raise UserError(f"{setting}: {env_id} has {exc}") from None
