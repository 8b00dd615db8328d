"""Rows of docs/reference/conventions.md whose package is run, but not in the environment of our tests.

    python tools/package_runs.py                 run what is installed here, compare it with read_conventions.py
    python tools/package_runs.py lerobot vla-eval

The packages do not fit into one environment: lerobot needs Python 3.12, gym-pusht an old pymunk. So nothing here
imports vla_rl, and each text is what the package did. A text that describes something stands for a condition that was
seen; it becomes "otherwise" where it does not hold.
"""

# ruff: noqa: SLF001 - what policies do to an image has no public names

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import simulator_conventions as measures
from read_conventions import DATA_ROWS, MODEL_ROWS, SIMULATOR_ROWS
from simulator_conventions import Array, MujocoTruth, keep_quiet
from simulator_players import GymPlayer, describe_type

Texts = Mapping[tuple[str, str], str]
"""(subject, simulator, model or format) -> text."""
LENGTH, CHUNK = 6, 4
"""Steps of a recorded episode, and actions of a chunk."""


def say(text: str, *holds: Any) -> str:
    """Return the text if all conditions hold."""
    return text if all(bool(np.all(one)) for one in holds) else "otherwise"


# ------------------------------------------------------------------------------------------------ simulators


def run_pusht() -> Texts:
    import gymnasium

    import_module("gym_pusht")
    env: Any = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", render_mode="rgb_array")
    scenes = [env.reset(seed=seed)[1]["block_pose"].tolist() for seed in (0, 0, 1)]
    _, info = env.reset(seed=0)
    before = np.array(info["block_pose"])
    goal = np.array([100.0, 400.0], np.float32)
    for _ in range(20):
        seen, *_, info = env.step(goal)
    blue = np.abs(seen["pixels"].astype(int) - np.array([65, 105, 225])).sum(-1) < 60
    rows, columns = (places.mean() * 512 / 96 for places in np.nonzero(blue))
    upright = abs(columns - 100) < 10 and abs(rows - 400) < 10
    still = np.array(env.reset(seed=0)[0]["agent_pos"], np.float32)
    rested = np.array(env.step(still)[-1]["block_pose"])
    put = [np.array(env.reset(options={"reset_to_state": [*still, *before]})[1]["block_pose"]) for _ in range(2)]
    env.unwrapped.block.angle = env.unwrapped.goal_pose[2]
    env.unwrapped.block.position = tuple(env.unwrapped.goal_pose[:2])
    *_, reward, terminated, _, info = env.step(still)
    limit = env.spec.max_episode_steps
    space = env.action_space
    dims = seen["agent_pos"].shape
    return {
        ("images", "gym-pusht"): f"{say('upright', upright)}, {len(blue)} px",
        ("gripper", "gym-pusht"): say("none", space.shape == (2,)),
        ("rotation", "gym-pusht"): say(
            "an action has none; the block's angle in radians is in info['block_pose']", abs(before[2]) <= np.pi
        ),
        ("action", "gym-pusht"): say(
            "x, y: where the pusher is to be, in pixels from 0 to 512, y downwards",
            upright,
            np.allclose(seen["agent_pos"], goal, atol=1),
            (space.low == 0) & (space.high == 512),
        ),
        ("state", "gym-pusht"): f"{dims[0]}: {say('x, y of the pusher', upright)}",
        ("seed", "gym-pusht"): say("the scene", scenes[0] == scenes[1], scenes[0] != scenes[2]),
        ("saved state", "gym-pusht"): say(
            "options['reset_to_state'] sets the angle after the position and turns about another point: the block "
            "moves",
            np.linalg.norm(put[0][:2] - before[:2]) > 10,
            np.allclose(put[0], put[1]),
        ),
        ("end without success", "gym-pusht"): f"truncated after {limit} actions",
        ("success", "gym-pusht"): say(
            f"terminated, reward up to {reward:g}, info['is_success']: {describe_type(info['is_success'])}", terminated
        ),
        ("settling", "gym-pusht"): say("none", np.allclose(rested, before, atol=0.5)),
        ("sentence", "gym-pusht"): find_sentence(env),
        ("camera", "gym-pusht"): say("from above, all 512 pixels of the table", upright),
        ("order of cameras", "gym-pusht"): ", ".join(name for name in seen if name != "agent_pos"),
    }


def run_aloha() -> Texts:
    import gymnasium

    import_module("gym_aloha")
    tasks = import_module("gym_aloha.tasks.sim")
    env: Any = gymnasium.make("gym_aloha/AlohaTransferCube-v0", obs_type="pixels_agent_pos")
    scenes = []
    for seed in (0, 0, 1):
        seen, _ = env.reset(seed=seed)
        scenes.append(np.array(tasks.BOX_POSE[0]).tolist())
    inner = env.unwrapped._env
    physics = inner.physics
    truth = MujocoTruth(physics.model.ptr, physics.data.ptr, "top", ("", ""), ())
    flip, _ = truth.compare_drawing(seen["pixels"]["top"])
    start = np.array(seen["agent_pos"], np.float32)
    target = start.copy()
    target[[0, 6, 13]] += np.array([0.2, 1.0, 0.0], np.float32)
    target[13] = 0.0
    things, last = truth.read_things(), 0
    for number in range(1, 16):
        seen, _, *_ = env.step(target)
        now = truth.read_things()
        last = number if np.abs(now - things).max() > 5e-4 else last
        things = now
    moved = np.array(seen["agent_pos"])
    absolute = abs(moved[0] - target[0]) < 0.05 and np.abs(moved[[1, 2, 7, 8]] - start[[1, 2, 7, 8]]).max() < 0.05
    inner.task.get_reward = lambda physics: 4
    _, reward, terminated, _, info = env.step(target)
    box = env.action_space
    height, width, _ = seen["pixels"]["top"].shape
    return {
        ("images", "gym-aloha"): f"{flip or 'upright'}, {height} x {width}",
        ("gripper", "gym-aloha"): say(
            f"0 closes, 1 opens, although the bounds are {box.low[6]:g} to {box.high[6]:g}",
            moved[6] > 0.8,
            moved[13] < 0.2,
        ),
        ("rotation", "gym-aloha"): say("an action has none", box.shape == (14,), absolute),
        ("action", "gym-aloha"): say(
            "left arm 6 joint angles [rad] and gripper, then the right ones; absolute", absolute, moved[6] > moved[13]
        ),
        ("state", "gym-aloha"): f"{len(moved)}: {say('the same order', absolute)}",
        ("seed", "gym-aloha"): say(
            "the scene, by way of a global variable", scenes[0] == scenes[1], scenes[0] != scenes[2]
        ),
        ("saved state", "gym-aloha"): say(
            "none", not {"set_state", "load_state", "restore_state"} & set(dir(env.unwrapped))
        ),
        ("end without success", "gym-aloha"): f"truncated after {env.spec.max_episode_steps} actions",
        ("success", "gym-aloha"): say(
            f"terminated, reward {reward:g}, info['is_success']: {describe_type(info['is_success'])}", terminated
        ),
        ("settling", "gym-aloha"): f"{last} actions" if last else "none",
        ("sentence", "gym-aloha"): find_sentence(env),
        ("camera", "gym-aloha"): truth.read_camera(),
        ("order of cameras", "gym-aloha"): ", ".join(seen["pixels"]),
    }


def run_fetch() -> Texts:
    import gymnasium

    with keep_quiet():
        gymnasium.register_envs(import_module("gymnasium_robotics"))
        make = lambda: gymnasium.make("FetchPickAndPlace-v4", render_mode="rgb_array", width=64, height=64)  # noqa: E731
        env: Any = make()
        env.reset(seed=0)
    inner = env.unwrapped
    hand, fingers = (
        ("robot0:grip", "robot0:gripper_link"),
        ("robot0:r_gripper_finger_joint", "robot0:l_gripper_finger_joint"),
    )
    truth = MujocoTruth(inner.model, inner.data, "external_camera_0", hand, fingers)
    player = GymPlayer(
        env, [0.0, 0.0, 0.0, 0.0], truth, "is_success", lambda one: one.env.render(), lambda _: None, lambda seen: seen
    )
    seen, _ = env.reset(seed=0)
    goals = [env.reset(seed=seed)[0]["desired_goal"].tolist() for seed in (0, 0, 1)]
    seed = measures.measure_seed(player)
    player.reset(0)
    turned = truth.read_hand()[1]
    for _ in range(10):
        player.step(np.array([0.5, 0.5, 0.0, 0.0]))
    kept = measures.find_rotation(truth.read_hand()[1]) * measures.find_rotation(turned).inv()
    apart = []
    for draws in (False, True):
        player.reset(0)
        for _ in range(10):
            player.step(np.array([1.0, 0.0, -0.3, 0.5]))
            if draws:
                player.draw_image()
        apart.append(player.observation["observation"])
    drawn = float(np.abs(apart[0] - apart[1]).max())
    restored = compare_restored(player)
    player.reset(0)
    step = None
    inner.goal = player.observation["achieved_goal"].copy()
    for _ in range(3):
        inner.goal = player.observation["achieved_goal"].copy()
        step = player.step(player.still)
    assert step is not None
    end = "terminated" if step.terminated else "truncated" if step.truncated else "continues"
    said = player.info["is_success"]
    width = len(seen["observation"])
    return {
        (
            "images",
            "Fetch",
        ): f"{say('upright', compare_free_camera(player))}; drawing calls mj_forward, which changes later "
        f"states by {describe_size(drawn)}",
        ("gripper", "Fetch"): measures.measure_gripper(player),
        ("rotation", "Fetch"): f"an action has none; the hand turns by {np.degrees(kept.magnitude()):.0f} degrees",
        ("action", "Fetch"): measures.measure_moves(player),
        ("state", "Fetch"): f"{width} of the observation; the goal is another entry of {len(seen['desired_goal'])}",
        ("seed", "Fetch"): say(
            "the scene and the goal", seed == "the scene", goals[0] == goals[1], goals[0] != goals[2]
        ),
        ("saved state", "Fetch"): say(
            "MuJoCo's integration state is not enough: the controller reads a position that is one sub-step old",
            restored["state"] > 1e-5,
            restored["data"] == 0,
        ),
        ("end without success", "Fetch"): measures.measure_limit(player, 1100),
        ("success", "Fetch"): f"{end}, reward {abs(step.reward):g}, info['is_success']: {describe_type(said)}",
        ("settling", "Fetch"): measures.measure_settling(player),
        ("sentence", "Fetch"): find_sentence(env),
        ("camera", "Fetch"): describe_free_camera(inner),
        ("order of cameras", "Fetch"): "one, by render()",
    }


def compare_restored(player: Any) -> dict[str, float]:
    """Return how far an episode of Fetch goes astray after its integration state, or all of its mjData, was put
    back."""
    import mujoco

    inner = player.env.unwrapped
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    action = np.array([1.0, -0.5, 0.2, 0.0])
    player.reset(0)
    for _ in range(5):
        player.step(action)
    saved = np.zeros(mujoco.mj_stateSize(inner.model, kind))
    mujoco.mj_getState(inner.model, inner.data, saved, kind)
    whole, own = copy(inner.data), inner.data
    futures = {}
    for how in ("as it was", "state", "data"):
        if how == "state":
            mujoco.mj_setState(inner.model, inner.data, saved, kind)
            mujoco.mj_forward(inner.model, inner.data)
        elif how == "data":
            inner.data = whole
        for _ in range(3):
            player.step(action)
        futures[how] = np.array(player.observation["observation"])
    inner.data = own
    return {how: float(np.abs(futures[how] - futures["as it was"]).max()) for how in ("state", "data")}


def compare_free_camera(player: Any) -> bool:
    """Return whether Fetch's image lies as what its free camera sees."""
    import mujoco

    inner = player.env.unwrapped
    image = player.draw_image()
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(inner.model, camera)
    for name, value in inner.mujoco_renderer.default_cam_config.items():
        setattr(camera, name, value)
    renderer = mujoco.Renderer(inner.model, *image.shape[:2])
    try:
        renderer.update_scene(inner.data, camera)
        drawn = renderer.render().astype(np.float64)
    finally:
        renderer.close()
    gaps = {name: np.abs(undo(image) - drawn).mean() for name, undo in measures.FLIPS.items()}
    return min(gaps, key=lambda name: gaps[name]) == ""


def describe_free_camera(inner: Any) -> str:
    settings = inner.mujoco_renderer.default_cam_config
    at = ", ".join(f"{number:g}" for number in settings["lookat"])
    view = f"{settings['distance']:g} m from {at}, azimuth {settings['azimuth']:g}, elevation {settings['elevation']:g}"
    return f"{view}; {inner.model.vis.global_.fovy:g} degrees high"


def describe_size(gap: float) -> str:
    """Return the order of magnitude of a difference."""
    return f"about {10.0 ** round(np.log10(gap)):g}" if gap else "nothing"


def find_sentence(env: Any) -> str:
    """Return what an environment tells a policy in words."""
    names = [name for name in dir(env.unwrapped) if "instruction" in name or "language" in name]
    return ", ".join(names) or "none"


# ------------------------------------------------------------------------------------- checkpoints and servers


def measure_images(process: Any, shape: tuple[int, int] = (96, 128)) -> dict[str, str]:
    """Return the rows of how images are processed."""
    import model_conventions as models

    return {
        "resize": models.measure_resize(process, shape),
        "crop": models.measure_crop(process, shape),
        "normalisation": models.measure_normalisation(process, shape),
    }


def run_openpi_client() -> Texts:
    import torch

    from model_conventions import SIDE, measure_resize

    tools = import_module("openpi_client.image_tools")
    frames = import_module("openpi_client.msgpack_numpy")

    def process(images: Array) -> Any:
        fitted = tools.resize_with_pad(images, SIDE, SIDE)
        return torch.from_numpy(fitted / 127.5 - 1).permute(0, 3, 1, 2)

    request = {"observation/image": np.zeros((2, 2, 3), np.uint8), "prompt": "pick up"}
    sent = import_module("msgpack").unpackb(frames.packb(request), strict_map_key=False)
    marks = all(isinstance(key, bytes) for key in sent["observation/image"])
    return {
        ("resize", "pi0, pi05"): measure_resize(process, (96, 128)),
        ("message", "openpi"): say(
            "msgpack map, keys with slashes, arrays as maps with bytes for keys", marks, set(sent) == set(request)
        ),
    }


def run_vla_eval() -> Texts:
    from PIL import Image
    from scipy.spatial.transform import Rotation

    messages = import_module("vla_eval.protocol.messages")
    benchmark = import_module("vla_eval.benchmarks.libero.benchmark")
    message = messages.Message(messages.MessageType("observation"), {"image": np.zeros((8, 8, 3), np.uint8)})
    sent = import_module("msgpack").unpackb(messages.pack_message(message))
    (picture,) = (value for value in sent["payload"]["image"].values() if isinstance(value, bytes))
    quaternion = np.array([0.5, -0.5, 0.5, -0.5])  # w < 0
    raw = {
        "robot0_eef_pos": np.array([1.0, 2.0, 3.0]),
        "robot0_eef_quat": quaternion,
        "robot0_gripper_qpos": np.array([4.0, 5.0]),
    }
    states = [
        benchmark.LIBEROBenchmark._proprio_state(SimpleNamespace(_quat_to_aa=convert), raw)
        for convert in (benchmark.quat_to_axisangle, benchmark._quat_to_axisangle_robosuite)
    ]
    turns = [Rotation.from_rotvec(state[3:6]).as_matrix() for state in states]
    in_order = [np.allclose(state[[0, 1, 2, 6, 7]], [1, 2, 3, 4, 5]) for state in states]
    apart = np.linalg.norm(states[0][3:6] - states[1][3:6])
    return {
        ("message", "vla-eval"): say(
            f"msgpack envelope of {', '.join(sent)}; images as PNG unless told otherwise",
            Image.open(BytesIO(picture)).format == "PNG",
        ),
        ("state order", "vla-eval on LIBERO"): say(
            f"position, rotation vector, 2 finger joints; the vector is {apart:.2f} rad away where w < 0, unless "
            "quat_no_antipodal",
            in_order,
            np.allclose(turns[0], turns[1], atol=1e-6),
        ),
    }


def run_transformers() -> Texts:
    import torch

    from model_conventions import SIDE

    found = import_module("transformers.models.pi0.image_processing_pi0").PI0ImageProcessor(
        size={"max_height": SIDE, "max_width": SIDE}, pad_size={"height": SIDE, "width": SIDE}
    )

    def process(images: Array) -> Any:
        tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
        return found(tensors, return_tensors="pt")["pixel_values"]

    return {(subject, "pi0 in transformers"): text for subject, text in measure_images(process).items()}


def run_lerobot() -> Texts:
    return {**run_lerobot_images(), **run_lerobot_numbers(), **run_lerobot_words(), **run_lerobot_data()}


def run_lerobot_images() -> Texts:
    import torch

    from model_conventions import SIDE

    pi0 = import_module("lerobot.policies.pi0.modeling_pi0").PI0Policy
    smolvla = import_module("lerobot.policies.smolvla.modeling_smolvla").SmolVLAPolicy
    groot = import_module("lerobot.policies.groot.processor_groot")
    name = "observation.images.front"
    config = SimpleNamespace(
        image_features=[name], image_resolution=(SIDE, SIDE), resize_imgs_with_padding=(SIDE, SIDE), empty_cameras=0
    )
    policy = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))

    def use(method: Any) -> Any:
        def process(images: Array) -> Any:
            batch = {name: torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255}
            return method(policy, batch)[0][0]

        return process

    def fit_by_area(images: Array) -> Any:
        settings = {"image_crop_size": None, "image_target_size": [SIDE, SIDE], "shortest_image_edge": SIDE}
        change = groot._transform_n1_7_image_for_vlm_albumentations
        fitted = np.stack([change(image, **settings, crop_fraction=0.95) for image in images])
        return torch.from_numpy(fitted / 127.5 - 1).permute(0, 3, 1, 2)

    several = {f"observation.images.{one}": torch.zeros(1, 3, SIDE, SIDE) + at for at, one in enumerate("ba")}
    policy.config.image_features = ["observation.images.a", "observation.images.b"]
    shown, _ = pi0._preprocess_images(policy, several)
    order = [round((float(image.mean()) + 1) / 2) for image in shown]
    policy.config.image_features = [name]
    texts: dict[tuple[str, str], str] = {}
    for model, process in (
        ("pi0, pi05 in lerobot", use(pi0._preprocess_images)),
        ("smolvla", use(smolvla.prepare_images)),
    ):
        texts |= {(subject, model): text for subject, text in measure_images(process).items()}
    by_area = measure_images(fit_by_area, (96, 96))
    texts |= {(subject, "gr00t N1.7"): by_area[subject] for subject in ("resize", "crop")}
    named = say("that of config.json's input features, whatever the batch's", order == [1, 0])
    texts["order of cameras", "pi0, pi05 in lerobot"] = texts["order of cameras", "smolvla"] = named
    return texts


def run_lerobot_numbers() -> Texts:
    import torch

    types = import_module("lerobot.configs.types")
    normalize = import_module("lerobot.processor.normalize_processor")
    libero = import_module("lerobot.processor.env_processor").LiberoProcessorStep()
    numbers = {"mean": [10.0, 20.0], "std": [4.0, 6.0], "min": [10.0, 20.0], "max": [14.0, 26.0]}
    statistics = {**numbers, "q01": numbers["min"], "q99": numbers["max"]}
    feature = types.PolicyFeature(type=types.FeatureType.ACTION, shape=(2,))

    def restore(mode: str, value: float) -> list[float]:
        step = normalize.UnnormalizerProcessorStep(
            features={"action": feature},
            norm_map={types.FeatureType.ACTION: types.NormalizationMode[mode]},
            stats={"action": {name: torch.tensor(row) for name, row in statistics.items()}},
        )
        transition = import_module("lerobot.processor").create_transition(action=torch.full((1, 2), value))
        restored: list[float] = step(transition)[import_module("lerobot.processor").TransitionKey.ACTION][0].tolist()
        return restored

    def scale(mode: str, low: float, names: tuple[str, str]) -> str:
        top = statistics["max"] if mode != "MEAN_STD" else [14.0, 26.0]
        return say(
            f"{low:g} is {names[0]}, 1 is {names[1]}",
            np.allclose(restore(mode, low), statistics["min"], atol=1e-4),
            np.allclose(restore(mode, 1.0), top, atol=1e-4),
        )

    position, fingers = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0]])
    quaternion = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
    robot = {"eef": {"pos": position, "quat": quaternion}, "gripper": {"qpos": fingers}}
    state = libero._process_observation({"observation.robot_state": robot})["observation.state"][0].numpy()
    ordered = np.allclose(state[[0, 1, 2, 6, 7]], [1, 2, 3, 4, 5])
    long = np.linalg.norm(state[3:6]) > np.pi
    return {
        ("action order and bounds", "smolvla"): scale("MEAN_STD", 0.0, ("mean", "mean + std")),
        ("action order and bounds", "pi0, pi05 in lerobot"): scale("QUANTILES", -1.0, ("q01", "q99"))
        + " (QUANTILES), or by MEAN_STD: the checkpoint's file says",
        ("state order", "smolvla on LIBERO"): say("position, rotation vector, 2 finger joints", ordered, long),
    }


def run_lerobot_words() -> Texts:
    import torch

    from model_conventions import SENTENCE

    processor = import_module("lerobot.processor")
    steps = {
        "smolvla": processor.NewLineTaskProcessorStep(),
        "pi0 in lerobot": import_module("lerobot.policies.pi0.processor_pi0").Pi0NewLineProcessor(),
        "pi05 in lerobot": import_module(
            "lerobot.policies.pi05.processor_pi05"
        ).Pi05PrepareStateTokenizerProcessorStep(),
    }
    texts: dict[tuple[str, str], str] = {}
    for name, step in steps.items():
        observation = {"observation.state": torch.zeros(1, 2)}
        given = processor.create_transition(observation=observation, complementary_data={"task": [SENTENCE]})
        made = step(given)[processor.TransitionKey.COMPLEMENTARY_DATA]["task"][0]
        texts["sentence", name] = repr(made)
    format_words = import_module("lerobot.policies.groot.utils").prepare_n1_7_language_batch
    formal, empty = (format_words([text], 1, formalize_language=True)[0] for text in (SENTENCE, ""))
    texts["sentence", "gr00t N1.7"] = f"{formal!r}; no instruction: {empty!r}"
    return texts


def run_lerobot_data() -> Texts:
    """Record two episodes, read them in chunks, and merge their statistics."""
    import torch

    datasets = import_module("lerobot.datasets.lerobot_dataset")
    aggregate = import_module("lerobot.datasets.compute_stats").aggregate_stats
    parts = [measure_rows(values) for values in (np.zeros(100), np.ones(300))]
    merged = {name: float(value.reshape(-1)[0]) for name, value in aggregate(parts)["action"].items()}
    features = {"action": {"dtype": "float32", "shape": (1,), "names": ["x"]}}
    with tempfile.TemporaryDirectory() as folder, keep_quiet():
        root = Path(folder, "set")
        made = datasets.LeRobotDataset.create("one/set", 10, features, root=root, use_videos=False)
        for first in (0, 10):
            for step in range(LENGTH):
                made.add_frame({"action": np.array([first + step], np.float32), "task": "move"})
            made.save_episode()
        made.finalize()
        times = {"action": [step / 10 for step in range(CHUNK)]}
        data = datasets.LeRobotDataset("one/set", root=root, delta_timestamps=times)
        count = len(data)
        last = data[LENGTH - 2]
        padded, masked = last["action"].reshape(-1).tolist(), last["action_is_pad"].tolist()
    smolvla = average_masked_loss(torch)
    repeated = padded == [4, 5, 5, 5] and masked == [False, False, True, True] and count == 2 * LENGTH
    return {
        ("ends of episodes", "lerobot"): say(
            "every step begins a chunk: the last action is repeated, and action_is_pad says where", repeated
        ),
        ("ends of episodes", "smolvla in lerobot"): say(
            "masked: the loss is divided by the number of recorded actions", smolvla == 2.0
        ),
        ("merged statistics", "lerobot"): say(
            "mean and std those of all rows; q01 and q99 averages of the parts', weighted by rows: 0.75 for 100 rows "
            "of 0 and 300 of 1",
            merged["mean"] == 0.75,
            np.isclose(merged["std"], np.sqrt(0.75 * 0.25)),
            np.isclose([merged["q01"], merged["q99"]], 0.75),
        ),
    }


def measure_rows(values: Array) -> dict[str, dict[str, Array]]:
    """Return lerobot's statistics of a feature of one number."""
    rows = import_module("lerobot.datasets.compute_stats").get_feature_stats(values[:, None], axis=0, keepdims=False)
    return {"action": {name: np.asarray(value) for name, value in rows.items()}}


def average_masked_loss(torch: Any) -> float:
    """Return SmolVLA's loss of a chunk of four whose last two actions are copies, where each recorded number costs 2
    and each copy 100."""
    policy_class = import_module("lerobot.policies.smolvla.modeling_smolvla").SmolVLAPolicy
    losses = torch.tensor([2.0, 2.0, 100.0, 100.0])[None, :, None]
    config = SimpleNamespace(
        action_feature=SimpleNamespace(shape=(1,)), max_action_dim=1, adapt_to_pi_aloha=False, image_features=[]
    )
    policy = SimpleNamespace(
        config=config,
        prepare_images=lambda batch: (None, None),
        prepare_state=lambda batch: None,
        prepare_action=lambda batch: None,
        model=SimpleNamespace(forward=lambda *given: losses.clone()),
    )
    batch = {name: torch.zeros(1) for name in ("observation.language.tokens", "observation.language.attention_mask")}
    batch["action_is_pad"] = torch.tensor([[False, False, True, True]])
    return float(policy_class.forward(policy, batch)[0])


def run_tensorflow() -> Texts:
    """Decode photographs of shades and of texture by TensorFlow and by Pillow."""
    from PIL import Image

    tf = import_module("tensorflow")
    y, x = np.mgrid[:64, :64]
    shades = np.stack([x * 4, y * 4, 255 - (x + y) * 2], -1).astype(np.uint8)
    texture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    found = []
    for image in (shades, texture):
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        pillow = np.asarray(Image.open(buffer)).astype(int)
        gap = np.abs(tf.io.decode_image(buffer.getvalue()).numpy().astype(int) - pillow)
        exact = tf.io.decode_jpeg(buffer.getvalue(), dct_method="INTEGER_ACCURATE").numpy().astype(int)
        found.append((100 * (gap > 0).mean(), gap.max(), np.abs(exact - pillow).max()))
    shares = " to ".join(f"{share:.0f}" for share in sorted(share for share, *_ in found))
    most = " and ".join(str(most) for _, most, _ in found)
    return {
        ("JPEG decoder", "rlds"): say(
            f"TensorFlow's fast one (dct_method): {shares} % of values differ from Pillow's, by up to {most} levels on "
            "shades and texture",
            not any(rest for *_, rest in found),
        )
    }


RUNS: Mapping[str, Callable[[], Texts]] = {
    "gym-pusht": run_pusht,
    "gym-aloha": run_aloha,
    "gymnasium-robotics": run_fetch,
    "openpi-client": run_openpi_client,
    "vla-eval": run_vla_eval,
    "transformers": run_transformers,
    "lerobot": run_lerobot,
    "tensorflow": run_tensorflow,
}
"""Distribution -> what it does."""


def list_rows(distribution: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (subject, name) -> (text, source) of the rows that a run of the distribution gave."""
    rows = [row for row in SIMULATOR_ROWS + MODEL_ROWS + DATA_ROWS if str(row[4]).startswith(f"run: {distribution} ")]
    return {(row[0], row[1]): (row[2], str(row[4])) for row in rows}


def compare_run(distribution: str) -> list[str]:
    """Run a distribution. Return what is not as the rows say; other versions differ in silence."""
    rows = list_rows(distribution)
    texts = RUNS[distribution]()
    wrong = [f"{key}: no row" for key in texts if key not in rows]
    for key, (text, source) in rows.items():
        if texts.get(key) != text:
            wrong.append(
                f"{key} ({source}; here {version(distribution)})\n  the row  {text}\n  the run  {texts.get(key)}"
            )
    return wrong


def is_here(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distributions", nargs="*", metavar="NAME", help="those to run; none: all that are installed")
    chosen = parser.parse_args().distributions or [name for name in RUNS if is_here(name)]
    if unknown := [name for name in chosen if name not in RUNS]:
        sys.exit(f"package_runs: {unknown[0]!r} is not run; those that are: {', '.join(RUNS)}")
    wrong = []
    for name in chosen:
        found = compare_run(name)
        print(f"{name} {version(name)}: {len(list_rows(name))} rows, {len(found)} differ", flush=True)
        wrong += found
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
