"""Worlds of one LIBERO task on MuJoCo Warp, which step, reset and render together. Tensors stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.config import CAMERAS
from vla_rl.plugins.envs.libero.scenes import MIB
from vla_rl.plugins.envs.libero.single_env import ACTION_DIM
from vla_rl.plugins.envs.libero.warp.buffers import BufferSizes, prepare_data
from vla_rl.plugins.envs.libero.warp.controller import make_controller
from vla_rl.plugins.envs.libero.warp.kernels import count_contacts, put_back, report_worlds, unpack_image
from vla_rl.plugins.envs.libero.warp.success import GoalKernels
from vla_rl.plugins.envs.libero.warp.task_model import EpisodeStart, TaskModel

wp.config.log_level = wp.LOG_ERROR  # Warp prints a line for each module that it loads
wp.config.cuda_output = "cubin"  # whatever the driver: it would compile PTX again

DRAWN_GROUP = 1
"""Group of the geoms that cameras see; group 0 holds collision geoms."""
SHARED = int(mjw.OverflowType.BROADPHASE | mjw.OverflowType.NARROWPHASE | mjw.OverflowType.CCD)
"""Overflows of buffers that all worlds share."""
OWN = int(mjw.OverflowType.NEFC | mjw.OverflowType.NJMAX_NNZ)
"""Overflows of a world's own buffers."""
MEMORY = ("goal_hand", "goal_rotation", "posture", "grip")
"""What the controller remembers."""
STATE = ("qpos", "qvel", "qacc_warmstart", "ctrl", *MEMORY)
"""What an action changes."""
STARTS = (*STATE[:4], "body_pos", "body_quat", "geom_xpos", "geom_xmat", *MEMORY)
"""Names of an `EpisodeStart`'s fields in Warp, in their order: all that the future of a world depends on."""
OF_ARMS = ("cdof", "subtree_com", "M", "qfrc_bias", "qpos", "qvel", "site_xpos", "site_xmat")
NO_GPU = (
    "libero_warp: Warp {warp} finds no GPU: it is built for CUDA {toolkit}, and the driver offers {driver}; install a "
    "driver whose CUDA has the same first number at least, or a warp-lang of an older CUDA"
)
NO_ROOM = (
    "libero_warp: {task}: {worlds} worlds cannot be allocated: {error}. Other processes on the GPU (nvidia-smi) use "
    "its memory too, or have it for themselves; end them, or lower env.num_envs"
)
CAPTURE_FAILED = (
    "libero_warp: the kernels of an action cannot be captured as a CUDA graph: {error}. Install a driver for CUDA 12.4 "
    "or newer, or set env.graphs: false, which launches about 3,600 kernels an action one by one: a tenth of a second "
    "or more, whatever the number of worlds"
)


class ActionResult(NamedTuple):
    """Result of one action in N worlds."""

    success: Array
    """bool [N]: the goal held after the action; False where it was not applied."""
    broken: Mapping[int, str]
    """World -> why it broke. A broken world is at the start that it had first, and has to be reset."""


class WorldBatch:
    """N worlds of one task. All step at each action; those that have to stay still are put back afterwards."""

    def __init__(
        self,
        task: TaskModel,
        start: EpisodeStart,
        num_worlds: int,
        cameras: Mapping[str, int],
        device: str,
        sizes: BufferSizes,
        graphs: bool,
    ) -> None:
        """Allocate the batch, with every world at `start`.

        Args:
            cameras: name -> height and width in pixels.
            sizes: of the buffers of contacts and constraints.
            graphs: on a GPU, launch the kernels of an action, and those of an observation, as one CUDA graph.
        """
        self.task = task
        self.num_worlds = num_worlds
        self.sizes = sizes
        self.peak_contacts = np.zeros(num_worlds, np.int32)
        """Most contacts of each world in a sub-step of the last action."""
        self._device = torch.device(device)
        self._cameras = dict(cameras)
        self._first_start = start
        try:
            if self._device.type != "cpu":
                self._check_gpu()
            with self._on_device():
                self._allocate_worlds(start)
                self._allocate_control()
                self._allocate_results()
        except RuntimeError as error:  # of Warp or torch: another process may have been faster
            raise UserError(NO_ROOM.format(task=task.task.name, worlds=num_worlds, error=error)) from error
        self.place(range(num_worlds), [start] * num_worlds)
        self._act = self._capture(self._launch_action, graphs)
        self._look = self._capture(self._launch_observation, graphs)
        self.place(range(num_worlds), [start] * num_worlds)

    def _check_gpu(self) -> None:
        """Raise UserError where Warp finds no GPU, or the worlds do not fit its memory."""
        if not wp.is_cuda_available():
            versions = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
            toolkit, driver = (".".join(map(str, version or ["none"])) for version in versions)
            raise UserError(NO_GPU.format(warp=wp.config.version, toolkit=toolkit, driver=driver))
        needed = self.sizes.predict_bytes(self.num_worlds, self._cameras)
        free, total = torch.cuda.mem_get_info(self._device)
        if needed > free:
            raise UserError(
                f"libero_warp: {self.task.task.name}: {self.num_worlds} worlds need about {needed // MIB} MiB, and "
                f"{free // MIB} of the GPU's {total // MIB} MiB are free beside all its processes; lower env.num_envs, "
                f"env.worlds, the cameras' sizes or env.contacts ({self.sizes.contacts} a world)"
            )

    def _allocate_worlds(self, start: EpisodeStart) -> None:
        model, sizes, num_worlds = self.task.model, self.sizes, self.num_worlds
        poses = prepare_data(model, start)
        self._model = mjw.put_model(model)
        self._model.opt.warn_overflow = 0  # `step` reports them
        self._data = mjw.put_data(model, poses, nworld=num_worlds, nconmax=sizes.contacts, njmax=sizes.constraints)
        self._model.body_pos = wp.array(np.tile(start.body_pos, (num_worlds, 1, 1)), dtype=wp.vec3)
        self._model.body_quat = wp.array(np.tile(start.body_quat, (num_worlds, 1, 1)), dtype=wp.quat)
        of_data = (*STATE[:4], "geom_xpos", "geom_xmat", "xpos", "xquat", "site_xpos")
        self._views = {name: wp.to_torch(getattr(self._data, name)) for name in of_data}
        self._views |= {name: wp.to_torch(getattr(self._model, name)) for name in ("body_pos", "body_quat")}

    def _allocate_control(self) -> None:
        """Allocate what the controller remembers, and what it needs of the model."""
        task, model, num_worlds = self.task, self.task.model, self.num_worlds
        memory = {
            "goal_hand": wp.zeros(num_worlds, dtype=wp.vec3),
            "goal_rotation": wp.zeros(num_worlds, dtype=wp.mat33),
            "posture": wp.zeros((num_worlds, 7), dtype=float),
            "grip": wp.zeros(num_worlds, dtype=float),
        }
        self._views |= {name: wp.to_torch(array) for name, array in memory.items()}
        self._actions = torch.zeros(num_worlds, ACTION_DIM, device=self._device)
        self._active = torch.zeros(num_worlds, dtype=torch.bool, device=self._device)
        self._was_active = np.zeros(num_worlds, bool)
        joints = np.stack([task.arm_positions, task.arm_velocities, task.arm_actuators]).astype(np.int32)
        low, high = model.actuator_ctrlrange[task.finger_actuators].T
        self._control_inputs = [
            task.hand_site,
            int(model.body_rootid[task.hand_body]),
            wp.array(joints, dtype=int),
            wp.array(_index_masses(model, task.arm_velocities).astype(np.int32), dtype=int),
            wp.array(model.actuator_ctrlrange[task.arm_actuators].T.astype(np.float32), dtype=float),
            wp.array(task.finger_actuators.astype(np.int32), dtype=int),
            wp.array(np.stack([high + low, [-1, 1] * (high - low)]).astype(np.float32) / 2, dtype=float),
            wp.from_torch(self._actions),
            *(getattr(self._data, name) for name in OF_ARMS),
            *memory.values(),
            self._data.ctrl,
        ]

    def _allocate_results(self) -> None:
        """Allocate what an action reports, the state before it, and what is observed."""
        num_worlds = self.num_worlds
        self._counts = wp.zeros((self.task.substeps, num_worlds), dtype=int)
        self._goal = GoalKernels(self.task.goal, num_worlds, self.task.model.ngeom)
        self._report = wp.zeros((num_worlds, 4), dtype=int)
        self._moved = wp.zeros(num_worlds, dtype=bool)
        self._state = {name: wp.from_torch(self._views[name].view(num_worlds, -1)) for name in STATE}
        self._before = {name: wp.zeros_like(array) for name, array in self._state.items()}
        self._fingers = torch.as_tensor(self.task.finger_positions, device=self._device)
        cameras = self._cameras.items()
        self._images = {name: wp.zeros((num_worlds, size, size, 3), dtype=wp.uint8) for name, size in cameras}
        self._render_context = self._make_renderer() if cameras else None

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which Warp allocates on the device, and launches in torch's stream."""
        context: AbstractContextManager[Any] = wp.ScopedDevice("cpu")
        if self._device.type != "cpu":
            context = wp.ScopedStream(wp.stream_from_torch(torch.cuda.current_stream(self._device)))
        return context

    def _capture(self, launch: Callable[[], None], graphs: bool) -> Callable[[], None]:
        """Return a function that launches kernels: `launch` itself, or on a GPU one graph of all that it launches."""
        if self._device.type == "cpu" or not graphs:
            return launch
        # By name: Warp raises TypeError for a torch.device without a number, which a worker's is.
        with wp.ScopedDevice(wp.device_from_torch(str(self._device))):
            wp.synchronize_device()  # the arrays were filled in torch's stream
            launch()  # compiles the kernels, which capturing cannot
            try:
                with wp.ScopedCapture() as capture:
                    launch()
                wp.capture_launch(capture.graph)
            except RuntimeError as error:
                raise UserError(CAPTURE_FAILED.format(error=error)) from error
            wp.synchronize_device()
        return partial(wp.capture_launch, capture.graph)

    # ------------------------------------------------------------------------------------------------ resets

    def place(self, worlds: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Put some worlds at the starts of episodes. The others are untouched."""
        rows = torch.as_tensor(list(worlds), device=self._device)
        for field, name in zip(EpisodeStart._fields, STARTS, strict=True):
            stacked = np.stack([getattr(start, field) for start in starts])
            self._views[name][rows] = torch.from_numpy(stacked).float().to(self._device)

    def snapshot(self) -> dict[str, Tensor]:
        """Return everything that `restore` of another batch of the task needs, in host memory."""
        return {name: self._views[name].cpu().clone() for name in STARTS}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        for name, values in snapshot.items():
            self._views[name].copy_(values)

    # ------------------------------------------------------------------------------------------------ steps

    def step(self, actions: Tensor, active: Array) -> ActionResult:
        """Apply one action, float [N, 7], in the worlds where `active` (bool [N]) holds. A world whose numbers are not
        finite, or with more contacts than fit, breaks; the others do not notice: if it took space from them, the action
        is repeated without it."""
        self._actions.copy_(actions)
        if (active != self._was_active).any():
            self._was_active = active.copy()
            self._active.copy_(torch.from_numpy(self._was_active), non_blocking=True)
        name, broken = self.task.task.name, dict[int, str]()
        while True:
            overflow, contacts, sound, success = self._apply_action().T
            self.peak_contacts = contacts
            if not (overflow & SHARED).any():
                break
            crowded = int(contacts.argmax())
            if crowded in broken:
                raise UserError(broken[crowded] + ", which does not suffice for the start of an episode either")
            broken[crowded] = self.sizes.explain_contacts(name, int(contacts[crowded]))
            with self._on_device():
                for state, before in zip(self._state.values(), self._before.values(), strict=True):
                    wp.copy(state, before)
            self.place([crowded], [self._first_start])
        tight = (overflow & OWN) != 0
        moved = active & (sound != 0) & ~tight
        moved[list(broken)] = False
        for world in (active & ~moved).nonzero()[0].tolist():
            unsound = f"libero_warp: {name}: positions or velocities are not finite numbers"
            broken.setdefault(world, self.sizes.explain_constraints(name) if tight[world] else unsound)
        broken = {world: text for world, text in broken.items() if active[world]}
        if broken:
            self.place(list(broken), [self._first_start] * len(broken))
        return ActionResult((success != 0) & moved, broken)

    def _apply_action(self) -> Array:
        """Run the sub-steps of the present action. Return what the worlds report, int32 [N, columns]; the host waits
        for nothing else."""
        with self._on_device():
            self._act()
        return np.array(wp.to_torch(self._report).cpu())

    def _launch_action(self) -> None:
        """Launch the kernels of an action, in all worlds. The goal is judged as LIBERO does: by poses and contacts
        before the last integration, and joint positions after it."""
        model, data, worlds = self._model, self._data, self.num_worlds
        data.overflow.zero_()
        self._counts.zero_()
        for state, before in zip(self._state.values(), self._before.values(), strict=True):
            wp.copy(before, state)
        contacts = [data.nacon, data.contact.worldid, self._counts]
        for substep in range(self.task.substeps):
            mjw.step1(model, data)
            wp.launch(count_contacts, dim=data.naconmax, inputs=[substep, *contacts])
            wp.launch(make_controller(float), dim=worlds, inputs=[substep == 0, *self._control_inputs])
            mjw.step2(model, data)
        scene = [data.xpos, data.site_xpos, data.site_xmat, data.qpos]
        self._goal.evaluate(scene, data.contact.geom, data.contact.worldid, data.nacon)
        inputs = [OWN, wp.from_torch(self._active), data.overflow, self._counts, self._goal.held, data.qpos, data.qvel]
        wp.launch(report_worlds, dim=worlds, inputs=inputs, outputs=[self._report, self._moved])
        for state, before in zip(self._state.values(), self._before.values(), strict=True):
            wp.launch(put_back, dim=state.shape, inputs=[self._moved, before], outputs=[state])

    # ------------------------------------------------------------------------------------------ observations

    def observe(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return the images of all worlds, camera -> uint8 [N, H, W, 3], oriented as those of `libero`, and
        proprioception, float32 [N, 8]. Images are valid until the next call."""
        with self._on_device():
            self._look()
        views, hand = self._views, self.task.hand_body
        w, axis = views["xquat"][:, hand, :1].clamp(-1.0, 1.0), views["xquat"][:, hand, 1:]
        sine = (1.0 - w * w).sqrt()
        rotation = torch.where(sine > 0, axis * 2.0 * w.acos() / torch.where(sine > 0, sine, 1.0), 0.0)
        position = views["site_xpos"][:, self.task.hand_site]
        state = torch.cat([position, rotation, views["qpos"][:, self._fingers]], dim=1)
        return {name: wp.to_torch(images) for name, images in self._images.items()}, state

    def read_poses(self) -> dict[str, Tensor]:
        """Return the poses that an expert reads, after `observe`, under LIBERO's names: float32 [N, 3]."""
        views = self._views
        poses = {f"{name}_pos": views["xpos"][:, body] for name, body in self.task.things.items()}
        return poses | {"robot0_eef_pos": views["site_xpos"][:, self.task.hand_site]}

    def _make_renderer(self) -> Any:
        return mjw.create_render_context(
            self.task.model,
            nworld=self.num_worlds,
            cam_res=[(size, size) for size in self._cameras.values()],
            render_rgb=True,
            render_depth=False,
            render_seg=False,
            enabled_geom_groups=[DRAWN_GROUP],
            cam_active=[CAMERAS[name] for name in self._cameras],
        )

    def _launch_observation(self) -> None:
        model, data, context = self._model, self._data, self._render_context
        mjw.kinematics(model, data)
        if context is None:
            return
        mjw.com_pos(model, data)
        mjw.camlight(model, data)
        mjw.refit_bvh(model, data, context)
        mjw.render(model, data, context)
        first = 0
        for images in self._images.values():
            wp.launch(unpack_image, dim=images.shape[:3], inputs=[first, context.rgb_data], outputs=[images])
            first += images.shape[1] * images.shape[2]


def _index_masses(model: Any, velocities: Any) -> Any:
    """Return where the arm's mass matrix is in MuJoCo's sparse one, int64 [7, 7]. It holds the lower triangle."""
    where = {
        (row, int(model.M_colind[entry])): entry
        for row in velocities.tolist()
        for entry in range(model.M_rowadr[row], model.M_rowadr[row] + model.M_rownnz[row])
    }
    return np.array([[where[max(i, j), min(i, j)] for j in velocities.tolist()] for i in velocities.tolist()])
