"""Measures what our data plugins make of recordings: small data sets are written and read."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from model_conventions import list_processors, measure_resize

Array = npt.NDArray[Any]
LENGTH, CHUNK = 6, 4
"""Steps of an episode, and actions of a chunk."""
EPISODES = (np.arange(LENGTH, dtype=np.float32)[:, None], np.arange(10, 10 + LENGTH, dtype=np.float32)[:, None])
"""Actions of two episodes, float32 [LENGTH, 1]."""
UNEQUAL = (np.zeros((100, 1), np.float32), np.ones((300, 1), np.float32))
CAMERA = "front"


def encode_jpeg(image: Array) -> bytes:
    return encode_image(image, "JPEG", quality=95)


def encode_image(image: Array, kind: str = "PNG", **settings: Any) -> bytes:
    buffer = BytesIO()
    Image.fromarray(image).save(buffer, kind, **settings)
    return buffer.getvalue()


BLACK = encode_image(np.zeros((8, 8, 3), np.uint8))


def open_data(name: str, folder: Path, chunk: int, **settings: Any) -> Any:
    """Open a data set of one number an action and one camera by our plugin."""
    from vla_rl.core.catalogue import load
    from vla_rl.core.contexts import DataContext
    from vla_rl.core.types import EnvInfo

    bounds = {"action_low": (-100.0,), "action_high": (100.0,)}
    env = EnvInfo(cameras={CAMERA: (8, 8)}, state_dim=0, tasks=(), **bounds)
    plugin = load("data", name)
    return plugin.build(plugin.config(folder=folder, **settings), DataContext(env=env, chunk=chunk))


def write_lerobot(folder: Path, episodes: Sequence[Array], image: bytes = BLACK) -> None:
    from vla_rl.toolkit.data.lerobot import LeRobotWriter
    from vla_rl.toolkit.data.recording import Recording

    with LeRobotWriter(folder, fps=10, robot="none") as writer:
        for actions in episodes:
            images, state = {CAMERA: [image] * len(actions)}, np.zeros((len(actions), 0), np.float32)
            writer.add(Recording(images=images, sizes={CAMERA: (8, 8)}, state=state, actions=actions, instruction="go"))


def write_rlds(folder: Path, episodes: Sequence[Array], image: bytes = BLACK) -> None:
    """Write a TFRecord file of tf.train.Example, an episode each."""
    folder.mkdir()
    with (folder / "set-train.tfrecord-00000-of-00001").open("wb") as file:
        for actions in episodes:
            steps = len(actions)
            features = {
                "steps/is_first": (3, encode_field(1, bytes([1] + [0] * (steps - 1)))),
                "steps/action": (2, encode_field(1, actions.astype("<f4").tobytes())),
                "steps/language_instruction": (1, encode_field(1, b"go") * steps),
                f"steps/observation/{CAMERA}": (1, encode_field(1, image) * steps),
            }
            entries = (
                encode_field(1, name.encode()) + encode_field(2, encode_field(kind, numbers))
                for name, (kind, numbers) in features.items()
            )
            record = encode_field(1, b"".join(encode_field(1, entry) for entry in entries))
            file.write(struct.pack("<Q", len(record)) + b"crc1" + record + b"crc2")


def encode_field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message that has a length: bytes, a message, or packed numbers."""
    length, size = b"", len(content)
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


WRITERS = {"lerobot": write_lerobot, "rlds": write_rlds}


def measure_ends(name: str, folder: Path) -> dict[str, str]:
    """Return what each value of `ends` makes of the steps that no whole chunk follows."""
    WRITERS[name](folder, EPISODES)
    whole = LENGTH - CHUNK + 1
    dropped, repeated, masked = (open_data(name, folder, CHUNK, ends=ends) for ends in ("drop", "repeat", "mask"))
    default = open_data(name, folder, CHUNK).num_samples()
    at = np.array([LENGTH - 2])
    copies = [data.read_samples(at)[1].reshape(-1).tolist() for data in (repeated, masked)]
    counts = [data.recorded_actions(at) for data in (dropped, repeated)]
    assert dropped.num_samples() == default == 2 * whole, default
    assert repeated.num_samples() == masked.num_samples() == 2 * LENGTH
    assert copies == [[4, 5, 5, 5]] * 2 and counts == [None, None]
    assert masked.recorded_actions(at).tolist() == [2]
    assert open_data(name, folder, 1).num_samples() == 2 * LENGTH
    return {
        "drop": "`ends: drop`, the default: the last C - 1 steps begin no chunk",
        "repeat": "`ends: repeat`: copies of the last action are learnt",
        "one": "with chunks of 1 every step",
        "all": "`ends`: drop (the default), repeat, or mask, which says how many are recorded",
    }


def measure_masked_loss() -> str:
    """Return what a loss is divided by whose chunk has copies."""
    import torch

    from vla_rl.toolkit.trainers.trained_model import TrainedModel

    costs = torch.tensor([[2.0, 2.0, 100.0, 100.0]])
    trained: Any = SimpleNamespace(
        strategy=SimpleNamespace(run=lambda compute: compute()),
        model=SimpleNamespace(imitation_terms=lambda obs, actions: costs),
    )
    loss = float(TrainedModel.imitation_loss(trained, None, None, np.array([2])))  # type: ignore[arg-type]
    divisors = {2.0: "the number of recorded actions", 1.0: "the number of all actions of the chunk"}
    return f"`ends: mask`: the loss is divided by {divisors.get(loss, f'another number ({loss:g})')}"


def measure_statistics(name: str, folder: Path) -> str:
    """Return what statistics of parts become, of data in which parts differ."""
    WRITERS[name](folder, UNEQUAL)
    numbers = {
        key: float(value[0]) for key, value in open_data(name, folder, CHUNK).data_statistics()["action"].items()
    }
    rows = np.concatenate(UNEQUAL)
    exact = {"mean": rows.mean(), "std": rows.std(), "q01": 0.0, "q99": 1.0, "min": 0.0, "max": 1.0}
    off = [key for key, value in exact.items() if key in numbers and not np.isclose(numbers[key], value)]
    assert not off and {"q01", "q99"} <= set(numbers), numbers
    return "of all rows: q01 is 0 and q99 is 1 there"


def measure_mixture(name: str, folders: Sequence[Path]) -> str:
    """Return whose statistics several data sets have."""
    from vla_rl.toolkit.data.mixture import MixedDemonstrations

    for folder, actions in zip(folders, EPISODES, strict=True):
        WRITERS[name](folder, [actions])
    parts = [open_data(name, folder, CHUNK) for folder in folders]
    least = MixedDemonstrations(parts, ["one", "two"]).data_statistics()["action"]["min"][0]
    most = MixedDemonstrations(parts, ["one", "two"]).data_statistics()["action"]["max"][0]
    names = {(0.0, 5.0): "those of the first data set", (0.0, 15.0): "those of all", (10.0, 15.0): "those of the last"}
    return names[float(least), float(most)]


def measure_decoder(folder: Path) -> str:
    """Return which decoder images of RLDS are read with, of an image on which decoders differ most."""
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    data = encode_jpeg(noise)
    write_rlds(folder, EPISODES, data)
    observation, _ = open_data("rlds", folder, CHUNK).read_samples(np.array([0]))
    read = np.asarray(observation.images[CAMERA][0])
    gap = np.abs(read.astype(int) - np.asarray(Image.open(BytesIO(data))).astype(int)).max()
    return f"Pillow's, {'to the bit' if gap == 0 else f'within {gap} levels'}"


def measure_data() -> Mapping[tuple[str, str], str]:
    """Return (subject, format or reader) -> what ours does."""
    texts: dict[tuple[str, str], str] = {}
    with TemporaryDirectory() as made:
        home = Path(made)
        ends = {name: measure_ends(name, home / f"ends-{name}") for name in WRITERS}
        for name in WRITERS:
            text = measure_statistics(name, home / f"unequal-{name}")
            mixed = measure_mixture(name, [home / f"mixed-{name}-{part}" for part in range(2)])
            key = name if name == "lerobot" else "rlds by openvla"
            texts["merged statistics", key] = f"{text}; of several data sets {mixed}"
        texts["merged statistics", "openpi"] = texts["merged statistics", "lerobot"].partition(":")[0]
        texts["JPEG decoder", "rlds"] = measure_decoder(home / "jpeg")
    process, shape = list_processors()["openvla"]
    texts["JPEG decoder", "openvla's evaluation"] = f"no JPEG: {measure_resize(process, shape)}"
    texts["ends of episodes", "lerobot"] = ends["lerobot"]["all"]
    texts["ends of episodes", "pi0, pi05"] = ends["lerobot"]["repeat"]
    texts["ends of episodes", "rlds by openvla"] = ends["rlds"]["one"]
    texts["ends of episodes", "rlds by openvla_oft"] = ends["rlds"]["drop"]
    texts["ends of episodes", "smolvla in lerobot"] = measure_masked_loss()
    return texts
