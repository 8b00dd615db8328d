"""Data sets that are damaged or made to do harm: each is refused in words that name the file, what is there and what is
expected."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.core.contexts import CheckContext, DataContext
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.plugins.data.lerobot import plugin
from vla_rl.plugins.data.lerobot.config import LeRobotConfig

recordings = pytest.importorskip("recordings", reason="needs the extra: pip install -e '.[data]'")
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

SIDE, CAMERA = 16, "observation.images.top"
ENV = EnvInfo(
    cameras={"top": (SIDE, SIDE)},
    state_dim=2,
    action_low=(-1.0,) * 3,
    action_high=(1.0,) * 3,
    tasks=(TaskInfo(name="pick", instruction="räum den Tisch auf", max_steps=9),),
)
TASK = "räum den Tisch auf"
Damage = Callable[[Path], None]


def episode(steps: int) -> dict[str, Any]:
    numbers = np.random.default_rng(steps)
    return {
        "actions": numbers.uniform(-1, 1, (steps, 3)).astype(np.float32),
        "state": numbers.random((steps + 1, 2), np.float32),
        "images": {"top": numbers.integers(0, 256, (steps + 1, SIDE, SIDE, 3), np.uint8)},
        "instruction": TASK,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[int, bool], Path]:
    home = tmp_path_factory.mktemp("hostile")
    paths = {(version, video): home / f"v{version}-{video}" for version in (2, 3) for video in (False, True)}
    for (version, video), folder in paths.items():
        recordings.write_lerobot(folder, [episode(4), episode(1)], version, video)
    return paths


def opened(folder: Path) -> Any:
    return plugin.build(LeRobotConfig(folder=folder), DataContext(env=ENV, chunk=1))


def read(folder: Path) -> Any:
    data = opened(folder)
    return data.read_samples(np.arange(data.num_samples()))


def text(name: str, content: str | bytes) -> Damage:
    """Put this into a file of `meta/`."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "meta" / name).write_bytes(raw) and None


def info(**values: Any) -> Damage:
    """Other values in info.json; None: without the key."""

    def damage(folder: Path) -> None:
        file = folder / "meta" / "info.json"
        changed = json.loads(file.read_text(encoding="utf-8")) | values
        kept = {key: value for key, value in changed.items() if value is not None}
        file.write_text(json.dumps(kept), encoding="utf-8")

    return damage


def column(name: str, values: Any, file: str) -> Damage:
    """Other values in a column of a Parquet file."""

    def damage(folder: Path) -> None:
        path = folder / file
        columns = pq.read_table(path).to_pydict()
        columns[name] = values(columns[name])
        pq.write_table(pa.table(columns), path)

    return damage


DATA_2 = "data/chunk-000/episode_000000.parquet"
EPISODES_3 = "meta/episodes/chunk-000/file-000.parquet"
FEATURES = {"action": {"dtype": "float32", "shape": [3]}}


@pytest.mark.parametrize(
    ("version", "damage", "message"),
    [
        (2, text("info.json", "[1, 2]"), r"info\.json holds a list, a JSON object is expected"),
        (2, text("info.json", "null"), r"info\.json holds nothing, a JSON object is expected"),
        (2, text("info.json", ""), r"cannot read .*info\.json: it is empty"),
        (2, text("info.json", '{"codebase_version": "v2.1", "fps'), r"info\.json: it is not JSON: .*ends too early"),
        (2, text("info.json", '{"fps": 1,}'), r"info\.json: it is not JSON: .*line 1 column"),
        (2, text("info.json", '{"fps": 1, "fps": 2}'), r"has the key 'fps' 2 times"),
        (2, text("info.json", "[" * 100_000), "nested too deeply"),
        (2, text("info.json", f'{{"fps": {"9" * 5000}}}'), r"info\.json: .*digits"),
        (2, text("info.json", '{"robot": "Gerät"}'.encode("latin-1")), r"not UTF-8 text \(byte 0xe4 at 14\)"),
        (2, text("info.json", "{}".encode("utf-16")), r"not UTF-8 text \(byte 0xff at 0\)"),
        (2, text("info.json", "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        (2, text("info.json", "{}"), "has no `codebase_version`, which LeRobot always writes"),
        (2, info(codebase_version=["v2"]), "of LeRobot's format .*; versions 2 and 3 are read"),
        (2, info(fps=0), r"info\.json: 'fps' is int 0, a number above 0 is expected"),
        (3, info(fps=-30), "'fps' is int -30, a number above 0"),
        (2, info(fps=float("nan")), "'fps' is float nan, a number above 0"),
        (2, info(fps=float("inf")), "'fps' is float inf, a number above 0"),
        (2, info(fps="30"), "'fps' is str '30', a number above 0"),
        (2, info(fps=True), "'fps' is bool True, a number above 0"),
        (2, info(fps=None), r"info\.json: 'fps' is missing"),
        (2, info(chunks_size=0), "'chunks_size' is int 0, a whole number from 1 on"),
        (2, info(features=["action"]), "'features' is a list, a JSON object is expected"),
        (2, info(features={"action": "float32"}), "features: 'action' is str 'float32', a JSON object is expected"),
        (2, info(features={"action": {"dtype": "float32"}}), "features: action: 'shape' is missing"),
        (2, info(features={"action": {"dtype": 3, "shape": [3]}}), "action: 'dtype' is int 3, a text is expected"),
        (
            2,
            info(features={"action": {"dtype": "float32", "shape": [-3]}}),
            "'shape' is a list, a list of whole numbers",
        ),
        (2, info(data_path=7), "'data_path' is int 7, a text is expected"),
        (2, info(data_path="/etc/{episode_index}"), r"'data_path' names the file '/etc/0', which is not inside"),
        (2, info(data_path="../{episode_index}"), r"'data_path' names the file '\.\./0', which is not inside"),
        (3, info(data_path="data/../../{file_index}"), "which is not inside"),
        (2, info(data_path="data/{episode_index.__class__}"), r"asks for {episode_index\.__class__}"),
        (2, info(data_path="data/{episode_idx}"), "did you mean 'episode_index'"),
        (2, info(data_path="data/{episode_index:9999999999d}"), "writes {episode_index} as '9999999999d'"),
        (2, info(data_path="data/{episode_index:{episode_chunk}}"), "writes {episode_index} as"),
        (2, info(data_path="data/{episode_index"), "which is not a path template"),
        (2, text("tasks.jsonl", '{"task_index": 0}\n'), r"tasks\.jsonl, line 1: 'task' is missing, a text is expected"),
        (2, text("tasks.jsonl", '\n{"task_index": 0, "task": 5}\n'), "line 2: 'task' is int 5, a text is expected"),
        (2, text("tasks.jsonl", '{"task_index": 0, "task": "\\ud800"}\n'), "'task' is str .*, a text is expected"),
        (2, text("tasks.jsonl", '["räum auf"]\n'), r"tasks\.jsonl, line 1 holds a list"),
        (2, text("tasks.jsonl", '{"task_index": -1, "task": "x"}\n'), "'task_index' is int -1, a whole number from 0"),
        (2, text("episodes.jsonl", '{"episode_index": 0}\n' * 2), "lists episode 0 2 times"),
        (2, text("episodes.jsonl", '{"episode_index": 1e3}\n'), r"'episode_index' is float 1000\.0, a whole number"),
        (2, text("episodes.jsonl", '{"episode_index": 9}\n'), r"half downloaded: it lacks data/.*000009"),
        (3, text("tasks.parquet", b"PAR1"), r"tasks\.parquet cannot be read"),
        (3, column("__index_level_0__", lambda _: [3], "meta/tasks.parquet"), "is int 3, a text is expected"),
        (3, column("__index_level_0__", lambda _: [None], "meta/tasks.parquet"), "is nothing, a text is expected"),
        (3, column("data/file_index", lambda v: [-1] * len(v), EPISODES_3), "row 0: 'data/file_index' is int -1"),
        (3, column("data/file_index", lambda v: ["a"] * len(v), EPISODES_3), "'data/file_index' is str 'a'"),
        (2, column("episode_index", lambda v: [None, *v[1:]], DATA_2), r"episode_index is int64 with 1 empty rows"),
        (2, column("timestamp", lambda v: [float("nan"), *v[1:]], DATA_2), "timestamp is not finite"),
        (2, column("frame_index", lambda v: [0] * len(v), DATA_2), "in episode 0 frame 0 follows frame 0"),
        (2, column("frame_index", lambda v: [0, 1, 7, 8], DATA_2), "in episode 0 frame 7 follows frame 1"),
        (2, text("episodes.jsonl", '{"episode_index": 0, "length": 5}\n'), "are 4 rows of episode 0, meta/ lists 5 of"),
        (3, column("length", lambda v: [-1] * len(v), EPISODES_3), "'length' is int -1, a whole number from 0 on"),
        (
            2,
            column("episode_index", lambda v: [1] * len(v), DATA_2),
            "there are no rows of episode 0, meta/ lists 4 of them",
        ),
        (2, column("action", lambda v: [["a"] * 3] * len(v), DATA_2), "its rows cannot be read"),
    ],
)
def test_lists_that_cannot_be_right_are_refused(
    version: int, damage: Damage, message: str, folders: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[version, False], folder)
    damage(folder)
    with pytest.raises(UserError, match=message):
        opened(folder)


def test_other_spellings_of_good_files_are_read(folders: Any, tmp_path: Path) -> None:
    """A byte order mark and line ends of Windows; other keys than are read; texts with separators of lines in them."""
    folder = tmp_path / "copy"
    shutil.copytree(folders[2, False], folder)
    for file in (folder / "meta").iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    obs, actions = read(folder)
    assert obs.instructions == (TASK,) * 5 and actions.shape == (5, 1, 3)  # an episode of one step is a sample
    (folder / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read(folder)[0].instructions[0] == "a\u2028b\x85c"


def test_links_of_a_cache_are_followed(folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache: `OWNER/NAME` and its folder, whose files are links into another one."""
    cache = tmp_path / "hub" / "datasets--me--my.set"
    snapshot = cache / "snapshots" / "abc123"
    for file in sorted(path for path in folders[3, False].rglob("*") if path.is_file()):
        link = snapshot / file.relative_to(folders[3, False])
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_LEROBOT_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("me/my.set", "me/my.set@abc123", "hf://datasets/me/my.set", str(cache), str(snapshot)):
        assert read(Path(name))[0].instructions[0] == TASK, name
    (cache / "refs").mkdir()
    (cache / "refs" / "v2").write_text("abc123")
    assert opened(Path("me/my.set@v2")).num_samples() == 5

    for asked, message in (
        ("me/other", r"me/other is not a folder .*looked in .*lerobot/me/other(?s:.*)hf download me/other --repo-type"),
        ("me/my.set@v9", "hf download me/my.set --repo-type dataset --revision v9"),
        (str(tmp_path / "hub"), r"is not a LeRobot data set: .*give one of them: datasets--me--my\.set"),
        (str(snapshot / "meta"), f"give {snapshot}, the data set that it is part of"),
        (str(snapshot / "meta" / "info.json"), "is a file"),
        (str(tmp_path / "nothing"), "does not exist; give the folder of a LeRobot data set"),
    ):
        with pytest.raises(Problems, match=message):
            plugin.check(LeRobotConfig(folder=Path(asked)), CheckContext(chunk=1))

    lerobot = tmp_path / "home"
    shutil.copytree(folders[2, False], lerobot / "me" / "mine")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(lerobot))
    assert opened(Path("me/mine")).num_samples() == 5
    with pytest.raises(UserError, match="it holds data sets, give one of them: me/mine"):
        opened(lerobot)


def png(width: int, height: int) -> bytes:
    """An image of zeros, as small as it gets."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + 3 * width)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", pixels) + part(b"IEND", b"")


def deep() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.zeros((SIDE, SIDE), np.uint16)).save(buffer, format="PNG")
    return buffer.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (png(900, 900), r"top cannot be decoded \(it has 900 x 900 pixels, the data set declares 256\)"),
        (png(1, 1)[:16] + struct.pack(">II", 50_000, 50_000) + png(1, 1)[24:], "top cannot be decoded"),
        (png(SIDE, SIDE)[:50], "top cannot be decoded"),
        (deep(), r"top cannot be decoded \(its numbers have more than 8 bits"),
        (EPS, "top cannot be decoded"),
        (b"", "top cannot be decoded"),
        (None, "top cannot be decoded"),
        (png(SIDE // 2, SIDE), f"images of {CAMERA} are 16 x 8 and 16 x 16; one size is expected"),
    ],
    ids=["too large", "a wrong size", "cut", "16 bits", "a program", "empty", "null", "another size"],
)
def test_images_are_bounded_by_what_is_declared(
    image: bytes | None, message: str, folders: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[2, False], folder)
    column(CAMERA, lambda v: [{"bytes": image, "path": "x.png"}, *v[1:]], DATA_2)(folder)
    with pytest.raises(UserError, match=message):
        read(folder)


@pytest.mark.parametrize("shape", [[100_000, 100_000, 3], [SIDE, SIDE], [0, 0, 3]])
def test_declared_sizes_are_bounded(shape: list[int], folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[2, True], folder)
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    info(features=features | {CAMERA: {"dtype": "video", "shape": shape}})(folder)
    with pytest.raises(UserError, match=rf"the 'shape' of '{CAMERA}' is \[.*at most 16,777,216 pixels is expected"):
        opened(folder)


def test_videos_are_bounded_by_what_is_declared(folders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[3, True], folder)
    read(folder)
    video = folder / f"videos/{CAMERA}/chunk-000/file-000.mp4"
    recordings._film(np.zeros((5, 512, 512, 3), np.uint8), video)
    with pytest.raises(UserError, match="has frames of 512 x 512 pixels, meta/info.json declares 256 pixels"):
        read(folder)
    shutil.copy(folders[3, True] / video.relative_to(folder), folder / "other.mp4")
    for content in ("ffconcat version 1.0\nfile other.mp4\n", "#EXTM3U\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n"):
        video.write_text(content)  # a list of other files
        with pytest.raises(UserError, match=r"file-000\.mp4 cannot be opened"):
            read(folder)
    info(video_path="../{video_key}/{chunk_index}/{file_index}.mp4")(folder)
    with pytest.raises(UserError, match=r"'video_path' names the file '\.\./.*which is not inside"):
        opened(folder)
    info(video_path=None)(folder)
    with pytest.raises(UserError, match="'video_path' is missing, a text is expected"):
        opened(folder)


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
sys.path[:0] = sys.argv[2:]
from test_hostile_files import opened, recordings, episode
from vla_rl.toolkit.data.lerobot import LeRobotWriter
from vla_rl.toolkit.data.recording import Recording, encode_png
folder = Path(sys.argv[1])
assert sys.getfilesystemencoding() and not sys.flags.utf8_mode
obs, _ = opened(folder / "read").read_samples(np.arange(5))
assert obs.instructions[0] == "r\\xe4um den Tisch auf", ascii(obs.instructions)
one = episode(1)
for name in ("a", "b"):
    with LeRobotWriter(folder / "written", fps=10, robot="r\\xf6bi") as writer:
        image = one["images"]["top"][0]
        writer.add(Recording(
            images={"top": [encode_png(image)]}, sizes={"top": image.shape[:2]}, state=one["state"][:1],
            actions=one["actions"], instruction="\\u7247\\u4ed8\\u3051\\u308b " + name, task="t\\xe4sk", identity=name))
obs, actions = opened(folder / "written").read_samples(np.arange(2))
assert obs.instructions == ("\\u7247\\u4ed8\\u3051\\u308b a", "\\u7247\\u4ed8\\u3051\\u308b b"), ascii(obs.instructions)
assert np.array_equal(actions[1, 0], one["actions"][0])
"""


def test_files_are_utf8_under_an_ascii_locale(folders: Any, tmp_path: Path) -> None:
    """Also what is written, in a folder with such a name."""
    home = tmp_path / "größer als sonst"
    shutil.copytree(folders[2, False], home / "read")
    ascii_only = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (home / "read" / "meta" / "tasks.jsonl").write_text(
        json.dumps({"task_index": 0, "task": TASK}, ensure_ascii=False), encoding="utf-8"
    )
    command = [sys.executable, "-c", SCRIPT, str(home), str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        command,
        env=os.environ | ascii_only,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stderr
