"""Rendering of LIBERO scenes on a selected graphics card, with one GL context per process and one copy of each texture
in it, which scenes share."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from weakref import WeakValueDictionary

import mujoco
import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.compiled import CompiledModels
from vla_rl.toolkit.envs.meshes import cells_for, simplify_meshes

MOST_GEOMS = 1000
"""Most geoms in an image; robosuite's limit."""


@cache
def gl_context() -> mujoco.GLContext:
    kind = os.environ["MUJOCO_GL"]  # MuJoCo reads the variable only at import
    of_kind = import_module(f"mujoco.{kind}") if kind in ("egl", "osmesa") else mujoco
    context = of_kind.GLContext(1, 1)  # everything is drawn into separate off-screen buffers
    atexit.register(context.free)
    return context


class Texture:
    """One texture in the memory of the graphics card (or of llvmpipe), freed when no scene uses it any more."""

    def __init__(self, model: mujoco.MjModel) -> None:
        """Load a texture.

        Args:
            model: model that holds this texture alone.
        """
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = 1
        faces = 1 if model.tex_type[0] == mujoco.mjtTexture.mjTEXTURE_2D else 6
        # RGBA; the smaller copies of a texture (mipmaps) take a third more.
        self.memory_bytes = faces * int(model.tex_width[0]) * int(model.tex_height[0]) * 4 * 4 // 3
        gl_context().make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        self.number = int(self._context.texture[0])

    def __del__(self) -> None:
        if not sys.is_finalizing():  # GL has ended already
            gl_context().make_current()
            self._context.free()


_LOADED: WeakValueDictionary[str, Texture] = WeakValueDictionary()
"""XML -> texture, for the textures that scenes of this process use."""


def load_textures(sources: Sequence[str | None], compiled: CompiledModels) -> list[Texture | None]:
    """Return the textures of a scene, indexed by texture number; None where the scene's own XML describes it."""
    distinct = {xml for xml in sources if xml is not None}
    texture_of = {xml: texture for xml, texture in _LOADED.items() if xml in distinct}
    missing = sorted(distinct - texture_of.keys())
    compiled.ensure_compiled(missing)
    for xml in missing:
        texture_of[xml] = _LOADED[xml] = Texture(compiled.load_model(xml))
    return [None if xml is None else texture_of[xml] for xml in sources]


class CameraModel:
    """Renders one model as robosuite does: visual meshes only."""

    def __init__(
        self, model: mujoco.MjModel, textures: Sequence[Texture | None], largest: int, simple: bool = False
    ) -> None:
        """Create a renderer.

        Args:
            textures: indexed by texture number; None: the model's own.
            largest: height or width of the largest image in pixels.
            simple: draw simplified meshes.
        """
        if not model.light_castshadow.any():
            model.vis.quality.shadowsize = 0  # else its shadow map would take 64 MiB
        model.vis.global_.offwidth = model.vis.global_.offheight = largest
        gl_context().make_current()
        self._model = model
        self.textures = tuple(texture for texture in textures if texture is not None)
        with simplify_meshes(model, cells_for(largest)) if simple else nullcontext():
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        # Put back before the context is freed, which would free the shared textures otherwise.
        self._own = self._context.texture.copy()
        for number, texture in enumerate(textures):
            if texture is not None:
                self._context.texture[number] = texture.number
        self._scene = mujoco.MjvScene(model, MOST_GEOMS)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[:2] = 0, 1
        self._view = mujoco.MjvCamera()
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._pointer = mujoco.MjvPerturb()

    def draw_image(self, data: mujoco.MjData, name: str, size: int) -> Array:
        """Return an image uint8 [H, W, 3] in OpenGL's order: bottom line first."""
        gl_context().make_current()
        frame, image = mujoco.MjrRect(0, 0, size, size), np.empty((size, size, 3), np.uint8)
        self._view.fixedcamid = self._model.camera(name).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._options, self._pointer, self._view, everything, self._scene)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        mujoco.mjr_render(frame, self._scene, self._context)
        mujoco.mjr_readPixels(image, None, frame, self._context)
        return image

    def close(self) -> None:
        gl_context().make_current()
        self._context.texture[:] = self._own  # shared textures are not freed
        self._context.free()
        self.textures = ()


VARIABLE = "MUJOCO_EGL_DEVICE_ID"


def egl_device(device: str, visible: str | None) -> str | None:
    """Return the value of MUJOCO_EGL_DEVICE_ID that makes MuJoCo draw on a torch device; None for a CPU.

    Torch counts only the cards that CUDA_VISIBLE_DEVICES lets through, EGL counts all of the machine. Where cards
    differ, torch counts in EGL's order only with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        device: "cuda:1", "cuda", "cpu".
        visible: CUDA_VISIBLE_DEVICES, such as "4,5"; None when it is not set.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    number = int(index or 0)
    if visible is None:
        return str(number)
    cards = [card.strip() for card in visible.split(",")]
    if number >= len(cards) or not cards[number].isdigit():
        raise UserError(
            f"cannot tell the EGL number of {device} from CUDA_VISIBLE_DEVICES={visible!r}\n"
            f"  name cards by their numbers there, as in CUDA_VISIBLE_DEVICES=4,5"
        )
    return cards[number]


def draw_on(device: str) -> None:
    """Select the card for this process, before the first scene is built. A MUJOCO_EGL_DEVICE_ID that is set stays."""
    if VARIABLE in os.environ:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = egl_device(device, visible)
    if number is None and visible is not None and not visible.split(",")[0].isdigit():
        number = "0"  # robosuite fails on an empty CUDA_VISIBLE_DEVICES, which Ray sets, and on cards named by UUID
    if number is not None:
        os.environ[VARIABLE] = number
