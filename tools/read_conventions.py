"""Rows of docs/reference/conventions.md that are read from a file, or that a package gave which is run elsewhere.

The left column of a row comes from its source: `run: PACKAGE VERSION`, which `package_runs.py` runs again, or a
`SourceLine`, which was read and not run. Our column is measured (`model_conventions.py`, `data_conventions.py`) where it
is empty here, and by tests/tools/test_conventions.py elsewhere.
"""

# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

from typing import NamedTuple

from source_lines import SITE, SourceLine


class SourceFile(NamedTuple):
    """A file of a package or of a repository."""

    file: str
    owner: str

    def at(self, number: int, holds: str) -> SourceLine:
        """Return a line of it, from 1, with text that it holds."""
        return SourceLine(self.file, number, holds, self.owner)


PUSHT = "run: gym-pusht 0.1.8"
ALOHA = "run: gym-aloha 0.1.5"
FETCH = "run: gymnasium-robotics 1.4.2, mujoco 3.3.0"
LEROBOT = "run: lerobot 0.6.1"
TENSORFLOW = "run: tensorflow 2.21.0"
OURS_ALONE = "run: vla-rl"
TASK = SourceFile(f"{SITE}robotwin/envs/_base_task.py", "rlinf-robotwin-runtime 0.1.3")
TWO_ARMS = SourceFile(f"{SITE}robotwin/envs/robot/robot.py", "rlinf-robotwin-runtime 0.1.3")
TWIN_CAMERAS = SourceFile(f"{SITE}robotwin/configs/task/_camera_config.yml", "rlinf-robotwin-runtime 0.1.3")
TWIN_VECTOR = SourceFile(f"{SITE}robotwin/envs/vector_env.py", "rlinf-robotwin-runtime 0.1.3")
TWIN_WORDS = SourceFile(f"{SITE}robotwin/description/instructions.py", "rlinf-robotwin-runtime 0.1.3")
SO101 = SourceFile(f"{SITE}lerobot/robots/so_follower/so_follower.py", "lerobot 0.6.1")
RECORD = SourceFile(f"{SITE}lerobot/scripts/lerobot_record.py", "lerobot 0.6.1")
WEBCAM = SourceFile(f"{SITE}lerobot/cameras/opencv/configuration_opencv.py", "lerobot 0.6.1")
METAWORLD_WORDS = SourceFile(f"{SITE}lerobot/envs/metaworld_config.json", "lerobot 0.6.1")
METAWORLD_CAMERA = SourceFile(f"{SITE}lerobot/envs/metaworld.py", "lerobot 0.6.1")
DEVICES = SourceFile(f"{SITE}lerobot/teleoperators/utils.py", "lerobot 0.6.1")
AS_IT_IS = "as it is"
AS_METAWORLD = "that of metaworld"
NOT_USED = "not used"
OF_THE_SPEC = "the spec's `instruction`"
NAMED = "that of `cameras`"

SIMULATOR_ROWS = (
    ("images", "gym-pusht", "upright, 96 px", AS_IT_IS, PUSHT),
    ("gripper", "gym-pusht", "none", AS_IT_IS, PUSHT),
    ("rotation", "gym-pusht", "an action has none; the block's angle in radians is in info['block_pose']", AS_IT_IS, PUSHT),
    ("action", "gym-pusht", "x, y: where the pusher is to be, in pixels from 0 to 512, y downwards", AS_IT_IS, PUSHT),
    ("state", "gym-pusht", "2: x, y of the pusher", AS_IT_IS, PUSHT),
    ("seed", "gym-pusht", "the scene", AS_IT_IS, PUSHT),
    ("saved state", "gym-pusht", "options['reset_to_state'] sets the angle after the position and turns about another point: the block moves", NOT_USED, PUSHT),
    ("end without success", "gym-pusht", "truncated after 300 actions", AS_IT_IS, PUSHT),
    ("success", "gym-pusht", "terminated, reward up to 1, info['is_success']: bool", AS_IT_IS, PUSHT),
    ("settling", "gym-pusht", "none", AS_IT_IS, PUSHT),
    ("sentence", "gym-pusht", "none", OF_THE_SPEC, PUSHT),
    ("camera", "gym-pusht", "from above, all 512 pixels of the table", AS_IT_IS, PUSHT),
    ("order of cameras", "gym-pusht", "pixels", NAMED, PUSHT),
    ("images", "gym-aloha", "upright, 480 x 640", AS_IT_IS, ALOHA),
    ("gripper", "gym-aloha", "0 closes, 1 opens, although the bounds are -1 to 1", AS_IT_IS, ALOHA),
    ("rotation", "gym-aloha", "an action has none", AS_IT_IS, ALOHA),
    ("action", "gym-aloha", "left arm 6 joint angles [rad] and gripper, then the right ones; absolute", AS_IT_IS, ALOHA),
    ("state", "gym-aloha", "14: the same order", AS_IT_IS, ALOHA),
    ("seed", "gym-aloha", "the scene, by way of a global variable", AS_IT_IS, ALOHA),
    ("saved state", "gym-aloha", "none", NOT_USED, ALOHA),
    ("end without success", "gym-aloha", "truncated after 300 actions", AS_IT_IS, ALOHA),
    ("success", "gym-aloha", "terminated, reward 4, info['is_success']: bool", AS_IT_IS, ALOHA),
    ("settling", "gym-aloha", "7 actions", AS_IT_IS, ALOHA),
    ("sentence", "gym-aloha", "none", OF_THE_SPEC, ALOHA),
    ("camera", "gym-aloha", "top at 0.00, 0.60, 0.80 m, 78 degrees high", AS_IT_IS, ALOHA),
    ("order of cameras", "gym-aloha", "top", NAMED, ALOHA),
    ("images", "Fetch", "upright; drawing calls mj_forward, which changes later states by about 0.01", AS_IT_IS, FETCH),
    ("gripper", "Fetch", "-1 closes, 1 opens, the sign decides", AS_IT_IS, FETCH),
    ("rotation", "Fetch", "an action has none; the hand turns by 4 degrees", AS_IT_IS, FETCH),
    ("action", "Fetch", "+x, +y, +z of the world; 3 actions of 1: 9, 9, 9 cm", AS_IT_IS, FETCH),
    ("state", "Fetch", "25 of the observation; the goal is another entry of 3", AS_IT_IS, FETCH),
    ("seed", "Fetch", "the scene and the goal", AS_IT_IS, FETCH),
    ("saved state", "Fetch", "MuJoCo's integration state is not enough: the controller reads a position that is one sub-step old", NOT_USED, FETCH),
    ("end without success", "Fetch", "truncated after 50 actions", AS_IT_IS, FETCH),
    ("success", "Fetch", "continues, reward 0, info['is_success']: float32", AS_IT_IS, FETCH),
    ("settling", "Fetch", "none", AS_IT_IS, FETCH),
    ("sentence", "Fetch", "none", OF_THE_SPEC, FETCH),
    ("camera", "Fetch", "2.5 m from 1.3, 0.75, 0.55, azimuth 132, elevation -14; 45 degrees high", AS_IT_IS, FETCH),
    ("order of cameras", "Fetch", "one, by render()", NAMED, FETCH),
    ("images", "lerobot_robot", "RGB as the camera hangs, unless its settings turn them", AS_IT_IS, WEBCAM.at(63, "Cv2Rotation.NO_ROTATION")),
    ("gripper", "lerobot_robot", "0 to 100 of its calibrated range, absolute", "action_bounds of its joint, absolute", SO101.at(59, "MotorNormMode.RANGE_0_100")),
    ("rotation", "lerobot_robot", "an action has none", AS_IT_IS, SO101.at(67, '{f"{motor}.pos": float')),
    ("action", "lerobot_robot", "targets of the joints, NAME.pos: degrees, or -100 to 100 of the calibrated range", "the same, or changes of them (step); at most max_step an action", SO101.at(50, "MotorNormMode.RANGE_M100_100")),
    ("state", "lerobot_robot", "6: present positions of the joints, NAME.pos", AS_IT_IS, SO101.at(183, "Present_Position")),
    ("seed", "lerobot_robot", "nothing", "nothing", SO101.at(180, "def get_observation(self)")),
    ("saved state", "lerobot_robot", "none", NOT_USED, SO101.at(233, "def disconnect(self)")),
    ("end without success", "lerobot_robot", "recording ends after episode_time_s", "core ends it after 600 actions", RECORD.at(482, "episode_time_s")),
    ("success", "lerobot_robot", "the event success of a teleoperator", "terminated, reward 1, success: bool", DEVICES.at(29, 'SUCCESS = "success"')),
    ("settling", "lerobot_robot", "none: a target is sent, and its arrival not waited for", AS_IT_IS, SO101.at(229, 'sync_write("Goal_Position"')),
    ("sentence", "lerobot_robot", "dataset.single_task, as it is written", "an entry of `tasks`, as it is written", RECORD.at(483, "single_task")),
    ("camera", "lerobot_robot", "as it hangs", AS_IT_IS, WEBCAM.at(61, "index_or_path")),
    ("order of cameras", "lerobot_robot", "that of the robot's settings", "that of the robot's settings", SO101.at(72, "for cam in self.cameras")),
    ("images", "robotwin", "upright, 240 x 320", AS_IT_IS, TWIN_CAMERAS.at(14, "h: 240")),
    ("gripper", "robotwin", "0 closes, 1 opens, absolute", "0 to 1", TWO_ARMS.at(669, "gripper_val in [0,1]")),
    ("rotation", "robotwin", "quaternion w x y z", "quaternion w x y z, normalised", TWO_ARMS.at(643, "t3d.quaternions.mat2quat")),
    ("action", "robotwin", "left arm, left gripper, right arm, right gripper: absolute joint targets (qpos) or poses (ee)", "14 joints, or 16 with end_effector", TASK.at(1537, "action_type:Literal['qpos', 'ee']='qpos'")),
    ("state", "robotwin", "14: joint_action.vector in the order of an action", "14", TASK.at(518, '["vector"] = np.array(left_jointstate + right_jointstate)')),
    ("seed", "robotwin", "the scene; some seeds are refused as unstable", "a state has up to 10 seeds to try", TASK.at(142, "raise UnStableError(")),
    ("saved state", "robotwin", "none", "the same scene, by its seed", TASK.at(1537, "def take_action")),
    ("end without success", "robotwin", "take_action does nothing after step_lim", "core ends it after 400 actions", TASK.at(1538, "self.take_action_cnt == self.step_lim")),
    ("success", "robotwin", "eval_success: bool, checked in every physics step", "terminated, reward 1, success: bool", TASK.at(1736, "self.eval_success = True")),
    ("settling", "robotwin", "2,500 physics steps at the start show whether things rest", AS_IT_IS, TASK.at(188, "for _ in range(2000)")),
    ("sentence", "robotwin", "one of a task's wordings, which names the things of the scene", "as RoboTwin draws it; another one in each scene", TWIN_WORDS.at(91, "rng.choice(descriptions)")),
    ("camera", "robotwin", "head where the embodiment's settings say, wrists on the hands; 37 degrees high", AS_IT_IS, TWIN_CAMERAS.at(12, "fovy: 37")),
    ("order of cameras", "robotwin", "full_image, left_wrist_image, right_wrist_image", "head, left_wrist, right_wrist", TWIN_VECTOR.at(54, '"full_image"')),
    ("sentence", "metaworld in lerobot", "'Push and close a drawer'", AS_METAWORLD, METAWORLD_WORDS.at(21, '"Push and close a drawer"')),
    ("camera", "metaworld in lerobot", "corner2 at 0.75, 0.075, 0.7 m", AS_METAWORLD, METAWORLD_CAMERA.at(155, "[0.75, 0.075, 0.7]")),
    ("images", "metaworld in lerobot", "upright", AS_METAWORLD, METAWORLD_CAMERA.at(172, "np.flip(image, (0, 1))")),
)  # fmt: skip

OPENVLA = SourceFile("prismatic/extern/hf/processing_prismatic.py", "openvla c8f03f48")
OPENVLA_MODEL = SourceFile("prismatic/extern/hf/modeling_prismatic.py", "openvla c8f03f48")
OPENVLA_EVALUATION = SourceFile("experiments/robot/libero/run_libero_eval.py", "openvla c8f03f48")
OPENVLA_IMAGES = SourceFile("experiments/robot/libero/libero_utils.py", "openvla c8f03f48")
OPENVLA_UTILS = SourceFile("experiments/robot/openvla_utils.py", "openvla c8f03f48")
OPENVLA_DATA = SourceFile("prismatic/vla/datasets/datasets.py", "openvla c8f03f48")
OPENVLA_STATISTICS = SourceFile("prismatic/vla/datasets/rlds/utils/data_utils.py", "openvla c8f03f48")
OFT = SourceFile("experiments/robot/openvla_utils.py", "openvla-oft 213c5ff8")
OFT_CONSTANTS = SourceFile("prismatic/vla/constants.py", "openvla-oft 213c5ff8")
OFT_EVALUATION = SourceFile("experiments/robot/libero/run_libero_eval.py", "openvla-oft 213c5ff8")
OFT_CHUNKS = SourceFile("prismatic/vla/datasets/rlds/traj_transforms.py", "openvla-oft 213c5ff8")
OPENPI_IMAGES = "run: openpi-client 0.1.2"
OPENPI = SourceFile("src/openpi/transforms.py", "openpi 15a9616a")
OPENPI_LIBERO = SourceFile("examples/libero/main.py", "openpi 15a9616a")
OPENPI_MODEL = SourceFile("src/openpi/models/model.py", "openpi 15a9616a")
OPENPI_WORDS = SourceFile("src/openpi/models/tokenizer.py", "openpi 15a9616a")
OPENPI_CAMERAS = SourceFile("src/openpi/policies/libero_policy.py", "openpi 15a9616a")
OPENPI_DATA = SourceFile("src/openpi/training/data_loader.py", "openpi 15a9616a")
OPENPI_STATISTICS = SourceFile("src/openpi/shared/normalize.py", "openpi 15a9616a")
SMOLVLA = SourceFile(f"{SITE}lerobot/policies/smolvla/configuration_smolvla.py", "lerobot 0.6.1")
NORMALISE = SourceFile(f"{SITE}lerobot/processor/normalize_processor.py", "lerobot 0.6.1")
N1_5 = SourceFile("gr00t/experiment/data_config.py", "Isaac-GR00T 16a6d6e1")
N1_5_IMAGES = SourceFile(
    f"{SITE}lerobot/policies/groot/eagle2_hg_model/image_processing_eagle2_5_vl_fast.py", "lerobot 0.5.1"
)
N1_7 = SourceFile(f"{SITE}lerobot/policies/groot/processor_groot.py", "lerobot 0.6.1")
RLINF = SourceFile("rlinf/envs/action_utils.py", "RLinf 8db28ac4")
ROBOARENA = SourceFile("roboarena/policy_server.py", "roboarena 6fa329f")
VLA_EVAL = "run: vla-eval 0.8.0"
VLA_EVAL_SERVER = SourceFile(f"{SITE}vla_eval/model_servers/predict.py", "vla-eval 0.8.0")
TRANSFORMERS = "run: transformers 5.5.4, torchvision 0.26.0"
LIBERO_STATE = "position, rotation vector, 2 finger joints"
AS_LIBERO = "the state of libero"

MODEL_ROWS = (
    ("resize", "openvla", "stretched, Pillow bicubic", "", OPENVLA.at(136, "TVF.resize(img,")),
    ("resize", "openvla, center_crop", "crop_and_resize of TensorFlow: bilinear, not antialiased, truncated at x 255.5", "", OFT.at(585, "tf.image.crop_and_resize(")),
    ("resize", "pi0, pi05", "aspect kept, black around, Pillow bilinear, to the bit", "", OPENPI_IMAGES),
    ("resize", "pi0, pi05 in lerobot", "aspect kept, black around, torch bilinear, to the bit", "", LEROBOT),
    ("resize", "pi0 in transformers", "aspect kept, grey on the right and bottom, Pillow bicubic, to the bit", "", TRANSFORMERS),
    ("resize", "smolvla", "aspect kept, black on the left and top, torch bilinear, to the bit", "", LEROBOT),
    ("resize", "gr00t N1.5", "stretched, torchvision bilinear antialiased on uint8", "", N1_5.at(102, 'interpolation="linear"')),
    ("resize", "gr00t N1.7", "stretched, OpenCV INTER_AREA, twice with a crop between, to the bit", "", LEROBOT),
    ("resize", "film_resnet", "ours alone", "", OURS_ALONE),
    ("crop", "openvla", "none in training without image_aug", "", OPENVLA.at(67, "self.tvf_crop_params")),
    ("crop", "openvla, center_crop", "the middle 0.9 of the area, sqrt(0.9) = 0.949 of each side", "", OFT.at(568, "tf.sqrt(crop_scale)")),
    ("crop", "pi0, pi05", "none in evaluation", "", OPENPI_LIBERO.at(118, "image_tools.resize_with_pad")),
    ("crop", "pi0, pi05 in lerobot", "none", "", LEROBOT),
    ("crop", "pi0 in transformers", "none", "", TRANSFORMERS),
    ("crop", "smolvla", "none", "", LEROBOT),
    ("crop", "gr00t N1.5", "the middle 0.95 of each side", "", N1_5.at(101, "scale=0.95")),
    ("crop", "gr00t N1.7", "the middle 0.94 of each side", "", LEROBOT),
    ("crop", "film_resnet", "ours alone", "", OURS_ALONE),
    ("normalisation", "openvla", "DINOv2's mean and std, then SigLIP's 0.5: six channels", "", OPENVLA.at(139, "TVF.normalize(")),
    ("normalisation", "openvla, center_crop", "the same", "", OPENVLA.at(143, "torch.vstack(imgs_t)")),
    ("normalisation", "pi0, pi05", "[-1, 1]", "", OPENPI_MODEL.at(118, "/ 255.0 * 2.0 - 1.0")),
    ("normalisation", "pi0, pi05 in lerobot", "[-1, 1]", "", LEROBOT),
    ("normalisation", "pi0 in transformers", "[-1, 1]", "", TRANSFORMERS),
    ("normalisation", "smolvla", "[-1, 1]", "", LEROBOT),
    ("normalisation", "gr00t N1.5", "[-1, 1]", "", N1_5_IMAGES.at(102, "IMAGENET_STANDARD_MEAN")),
    ("normalisation", "gr00t N1.7", "[-1, 1]: Qwen's image processor", "", N1_7.at(1372, "Qwen2VLImageProcessor.from_pretrained")),
    ("normalisation", "film_resnet", "ours alone", "", OURS_ALONE),
    ("sentence", "openvla", "lower case, nothing else changed", "", OPENVLA_UTILS.at(163, "task_label.lower()")),
    ("sentence", "pi0", "white space at the ends off, `_` and newlines to spaces, a newline after it", "", OPENPI_WORDS.at(23, '.strip().replace("_", " ")')),
    ("sentence", "pi0 in lerobot", "' Pick_up the RED cube. \\n'", "", LEROBOT),
    ("sentence", "pi05 in lerobot", "'Task: Pick up the RED cube., State: 128 128;\\nAction: '", "", LEROBOT),
    ("sentence", "smolvla", "' Pick_up the RED cube. \\n'", "", LEROBOT),
    ("sentence", "gr00t N1.7", "' pick_up the red cube '; no instruction: 'perform the task'", "", LEROBOT),
    ("order of cameras", "openvla_oft", "full_image, then those with `wrist` in their names", "", OFT.at(748, '"wrist" in k')),
    ("order of cameras", "pi0, pi05", "base, left wrist, right wrist; a missing one is zeros and masked", "", OPENPI_CAMERAS.at(62, "np.zeros_like(base_image)")),
    ("order of cameras", "pi0, pi05 in lerobot", "that of config.json's input features, whatever the batch's", "", LEROBOT),
    ("order of cameras", "smolvla", "that of config.json's input features, whatever the batch's", "", LEROBOT),
    ("order of cameras", "gr00t", "video_keys of the embodiment", "", N1_5.at(50, "video_keys")),
    ("order of cameras", "film_resnet", "ours alone", "", OURS_ALONE),
    ("state order", "openvla_oft on LIBERO", LIBERO_STATE, AS_LIBERO, OFT_EVALUATION.at(258, 'quat2axisangle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"]')),
    ("state order", "pi0, pi05 on LIBERO", LIBERO_STATE, AS_LIBERO, OPENPI_LIBERO.at(136, '_quat2axisangle(obs["robot0_eef_quat"])')),
    ("state order", "smolvla on LIBERO", LIBERO_STATE, AS_LIBERO, LEROBOT),
    ("state order", "vla-eval on LIBERO", "position, rotation vector, 2 finger joints; the vector is 6.28 rad away where w < 0, unless quat_no_antipodal", AS_LIBERO, VLA_EVAL),
    ("action order and bounds", "openvla", "position, rotation vector, gripper; id V - 1 - i is bin i, from q01 up", "", OPENVLA_MODEL.at(522, "self.vocab_size - predicted_action_token_ids")),
    ("action order and bounds", "pi0", "z-scores of the data's order", "", OPENPI.at(173, "x * (std + 1e-6) + mean")),
    ("action order and bounds", "pi05", "quantiles of the data's order", "", OPENPI.at(181, "(q99 - q01 + 1e-6) + q01")),
    ("action order and bounds", "pi0, pi05 in lerobot", "-1 is q01, 1 is q99 (QUANTILES), or by MEAN_STD: the checkpoint's file says", "", LEROBOT),
    ("action order and bounds", "smolvla", "0 is mean, 1 is mean + std", "", LEROBOT),
    ("action order and bounds", "gr00t", "smallest and largest number of the data, by key", "", N1_7.at(2242, "* 0.5 * (max_v - min_v) + min_v")),
    ("gripper", "openvla, gripper: rlds", "sign(2 g - 1), then negated: data 0 is closed", "", OPENVLA_EVALUATION.at(225, "invert_gripper_action(action)")),
    ("gripper", "openvla, gripper: widowx", "2 (g > 0.5) - 1: data 0 is closed", "", RLINF.at(49, '2.0 * (raw_actions["open_gripper"] > 0.5) - 1.0')),
    ("gripper", "openvla, gripper: keep", "as the data", "", OPENVLA_MODEL.at(528, '"mask"')),
    ("gripper", "pi0, pi05", "as the data: openpi's LIBERO set has -1 for open", "", OPENPI_LIBERO.at(17, "[-1.0]")),
    ("gripper", "smolvla", "as the data", "", NORMALISE.at(361, "return tensor * std + mean")),
    ("gripper", "gr00t, gripper: libero", "1 - 2 g, its sign: data 0 is closed", "", N1_7.at(2292, "-np.sign(2.0 * gripper - 1.0)")),
    ("gripper", "gr00t, gripper: as_is", "as the data", "", N1_7.at(2470, "libero_gripper_action: bool = False")),
    ("executed steps", "openvla", "1 of 1", "rollout.chunk", OPENVLA_EVALUATION.at(211, "action = get_action(")),
    ("executed steps", "openvla_oft", "8 of 8 on LIBERO, 25 of 25 on ALOHA", "rollout.chunk", OFT_CONSTANTS.at(27, '"NUM_ACTIONS_CHUNK": 8')),
    ("executed steps", "pi0, pi05", "5 of 10 or 50 on LIBERO (replan_steps)", "rollout.chunk, else n_action_steps", OPENPI_LIBERO.at(29, "replan_steps: int = 5")),
    ("executed steps", "smolvla", "n_action_steps, 50 of 50", "rollout.chunk, else n_action_steps", SMOLVLA.at(30, "n_action_steps: int = 50")),
    ("executed steps", "openpi", "the whole chunk is sent, the client chooses", "", OPENPI_LIBERO.at(148, "action_chunk[: args.replan_steps]")),
    ("executed steps", "roboarena", "all that are sent", "", ROBOARENA.at(47, "all N actions will get executed")),
    ("executed steps", "vla-eval", "one, or a chunk that the harness plays", "", VLA_EVAL_SERVER.at(88, "2-D array of shape")),
    ("message", "openpi", "msgpack map, keys with slashes, arrays as maps with bytes for keys", "", OPENPI_IMAGES),
    ("message", "roboarena", "openpi's, with `endpoint`", "", ROBOARENA.at(89, 'obs["endpoint"]')),
    ("message", "vla-eval", "msgpack envelope of type, payload, seq, timestamp; images as PNG unless told otherwise", "", VLA_EVAL),
)  # fmt: skip

DATA_ROWS = (
    ("JPEG decoder", "rlds", "TensorFlow's fast one (dct_method): 68 to 78 % of values differ from Pillow's, by up to 4 and 7 levels on shades and texture", "", TENSORFLOW),
    ("JPEG decoder", "openvla's evaluation", "images go through TensorFlow's JPEG and back, then Lanczos to 224", "", OPENVLA_IMAGES.at(43, "tf.io.decode_image(img")),
    ("ends of episodes", "lerobot", "every step begins a chunk: the last action is repeated, and action_is_pad says where", "", LEROBOT),
    ("ends of episodes", "rlds by openvla", "chunks of 1: every step", "", OPENVLA_DATA.at(104, "future_action_window_size=0")),
    ("ends of episodes", "rlds by openvla_oft", "dropped: the last C - 1 steps begin no chunk", "", OFT_CHUNKS.at(27, "traj_len - future_action_window_size")),
    ("ends of episodes", "pi0, pi05", "repeated and learnt: action_is_pad is not read", "", OPENPI_DATA.at(143, "delta_timestamps={")),
    ("ends of episodes", "smolvla in lerobot", "masked: the loss is divided by the number of recorded actions", "", LEROBOT),
    ("merged statistics", "lerobot", "mean and std those of all rows; q01 and q99 averages of the parts', weighted by rows: 0.75 for 100 rows of 0 and 300 of 1", "", LEROBOT),
    ("merged statistics", "rlds by openvla", "of all rows; one set for each data set of a mixture", "", OPENVLA_STATISTICS.at(247, "np.quantile(actions, 0.01, axis=0)")),
    ("merged statistics", "openpi", "running: quantiles from 5,000 bins between the numbers seen so far", "", OPENPI_STATISTICS.at(28, "_num_quantile_bins = 5000")),
)  # fmt: skip
