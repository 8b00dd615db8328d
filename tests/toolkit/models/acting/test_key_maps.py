"""Key maps: presets, files, and what is said of wrong ones. Servers and clients try them in tests/serving."""

from __future__ import annotations

import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.types import EnvInfo, TaskInfo
from vla_rl.toolkit.models.acting.key_maps import PRESETS, KeyMap, default_key_map, read_key_map

INFO = EnvInfo(
    cameras={"top": (4, 4), "wrist": (4, 4)},
    state_dim=0,
    action_low=(0.0,),
    action_high=(1.0,),
    tasks=(TaskInfo(name="t", instruction="i", max_steps=1),),
)


def test_a_file(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("images: {wrist: b, top: a}\nstate: s\nrotate_180: true\n")
    keys = read_key_map(str(file))
    assert keys == KeyMap(images={"wrist": "b", "top": "a"}, state=["s"], rotate_180=True)
    assert keys.camera_keys(INFO) == {"top": "a", "wrist": "b"}


def test_keys_alone_are_those_of_the_cameras_in_their_order():
    assert PRESETS["libero"].camera_keys(INFO) == {"top": "observation/image", "wrist": "observation/wrist_image"}
    assert (
        default_key_map(INFO).camera_keys(INFO) == {"top": "observation/top", "wrist": "observation/wrist"}
        and not default_key_map(INFO).state
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_names(name):
    assert read_key_map(name) is PRESETS[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- images", "a key map has the keys action_space, channels_first, images"),
        ("imagse: {}", "a key map has the keys"),
        ("state: [a]", "is not a key map: .*'images'"),
        ("images: [a]\naction_space: joints", "is not a key map: .*joint_position"),
        ("images: [", "not valid YAML"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_key_map(str(tmp_path / "keys.yaml"))


def test_a_camera_without_a_key():
    with pytest.raises(UserError, match="no key for camera 'wrist' of the policy"):
        KeyMap(images=["a"]).camera_keys(INFO)
    with pytest.raises(UserError, match="did you mean 'libero'"):
        read_key_map("liber")
