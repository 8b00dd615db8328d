"""Rows of docs/reference/conventions.md that are read from a file, or whose package was run where it is installed.

`SITE` is site-packages. The left column of a row about a model is its authors' code; our column is measured
(`model_conventions.py`) wherever it can be.
"""

# ruff: noqa: E501 - a row of a table is one line

from __future__ import annotations

PUSHT = "run and SITE/gym_pusht/envs/pusht.py of gym-pusht 0.1.8"
ALOHA = "run and SITE/gym_aloha/env.py of gym-aloha 0.1.5"
ALOHA_TASK = "SITE/gym_aloha/tasks/sim.py of gym-aloha 0.1.5"
FETCH = "run and SITE/gymnasium_robotics/envs/robot_env.py of gymnasium-robotics 1.4.2"
FETCH_TASK = "SITE/gymnasium_robotics/envs/fetch/fetch_env.py of gymnasium-robotics 1.4.2"
ROBOTWIN = "SITE/robotwin/envs/_base_task.py of rlinf-robotwin-runtime 0.1.3"
ROBOTWIN_ROBOT = "SITE/robotwin/envs/robot/robot.py of rlinf-robotwin-runtime 0.1.3"
SO101 = "SITE/lerobot/robots/so_follower/so_follower.py of lerobot 0.6.1"
AS_IT_IS = "as it is"
NOT_USED = "not used"

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
    ("images", "gym-aloha", "upright, 480 x 640", AS_IT_IS, ALOHA),
    ("gripper", "gym-aloha", "0 closes, 1 opens, although the bounds are -1 to 1", AS_IT_IS, ALOHA_TASK),
    ("rotation", "gym-aloha", "an action has none", AS_IT_IS, ALOHA_TASK),
    ("action", "gym-aloha", "left arm 6 joint angles [rad] and gripper, then the right ones; absolute", AS_IT_IS, ALOHA_TASK),
    ("state", "gym-aloha", "14: the same order", AS_IT_IS, ALOHA_TASK),
    ("seed", "gym-aloha", "the scene, by way of a global variable", AS_IT_IS, ALOHA),
    ("saved state", "gym-aloha", "none", NOT_USED, ALOHA),
    ("end without success", "gym-aloha", "truncated after 300 actions", AS_IT_IS, "SITE/gym_aloha/__init__.py of gym-aloha 0.1.5"),
    ("success", "gym-aloha", "terminated, reward 4, info['is_success']: bool", AS_IT_IS, ALOHA),
    ("settling", "gym-aloha", "none", AS_IT_IS, ALOHA),
    ("images", "Fetch", "upright; drawing calls mj_forward, which changes later states by about 0.001", AS_IT_IS, FETCH),
    ("gripper", "Fetch", "-1 closes, 1 opens", AS_IT_IS, FETCH),
    ("rotation", "Fetch", "an action has none; the hand keeps its rotation (a quaternion w x y z)", AS_IT_IS, FETCH_TASK),
    ("action", "Fetch", "x, y, z of the world, 1 is 5 cm; the gripper last", AS_IT_IS, FETCH_TASK),
    ("state", "Fetch", "25 of the observation; the goal is another entry of 3", AS_IT_IS, FETCH),
    ("seed", "Fetch", "the scene and the goal", AS_IT_IS, FETCH),
    ("saved state", "Fetch", "MuJoCo's integration state is not enough: the controller reads a position that is one sub-step old", NOT_USED, FETCH_TASK),
    ("end without success", "Fetch", "truncated after 50 actions", AS_IT_IS, FETCH),
    ("success", "Fetch", "continues, reward 0, info['is_success']: float32", AS_IT_IS, FETCH),
    ("settling", "Fetch", "ten steps at construction", AS_IT_IS, FETCH_TASK),
    ("images", "lerobot_robot", "RGB as the camera hangs, unless its settings turn them", AS_IT_IS, "SITE/lerobot/cameras/opencv/configuration_opencv.py of lerobot 0.6.1"),
    ("gripper", "lerobot_robot", "0 to 100 of its calibrated range, absolute", "action_bounds of its joint, absolute", SO101),
    ("rotation", "lerobot_robot", "an action has none", AS_IT_IS, SO101),
    ("action", "lerobot_robot", "targets of the joints, NAME.pos: degrees, or -100 to 100 of the calibrated range", "the same, or changes of them (step); at most max_step an action", SO101),
    ("state", "lerobot_robot", "6: present positions of the joints, NAME.pos", AS_IT_IS, SO101),
    ("seed", "lerobot_robot", "nothing", "nothing", SO101),
    ("saved state", "lerobot_robot", "none", NOT_USED, SO101),
    ("end without success", "lerobot_robot", "recording ends after episode_time_s", "core ends it after 600 actions", "SITE/lerobot/scripts/lerobot_record.py of lerobot 0.6.1"),
    ("success", "lerobot_robot", "the event success of a teleoperator", "terminated, reward 1, success: bool", "SITE/lerobot/teleoperators/utils.py of lerobot 0.6.1"),
    ("settling", "lerobot_robot", "none: a target is sent, and its arrival not waited for", AS_IT_IS, SO101),
    ("images", "robotwin", "upright, 240 x 320", "", ROBOTWIN),
    ("gripper", "robotwin", "0 closes, 1 opens, absolute", "0 to 1", ROBOTWIN_ROBOT),
    ("rotation", "robotwin", "quaternion w x y z", "quaternion w x y z, normalised", ROBOTWIN_ROBOT),
    ("action", "robotwin", "left arm, left gripper, right arm, right gripper: absolute joint targets (qpos) or poses (ee)", "14 joints, or 16 with end_effector", ROBOTWIN),
    ("state", "robotwin", "14: joint_action.vector in the order of an action", "14", ROBOTWIN),
    ("seed", "robotwin", "the scene; some seeds are refused as unstable", "a state has up to 10 seeds to try", ROBOTWIN),
    ("saved state", "robotwin", "none", "", ROBOTWIN),
    ("end without success", "robotwin", "take_action does nothing after step_lim", "core ends it after 400 actions", ROBOTWIN),
    ("success", "robotwin", "eval_success: bool, checked in every physics step", "", ROBOTWIN),
    ("settling", "robotwin", "2,500 physics steps at the start show whether things rest", "", ROBOTWIN),
)  # fmt: skip

OPENVLA = "prismatic/extern/hf/processing_prismatic.py of openvla c8f03f48"
OPENVLA_MODEL = "prismatic/extern/hf/modeling_prismatic.py of openvla c8f03f48"
OPENVLA_EVALUATION = "experiments/robot/libero/run_libero_eval.py of openvla c8f03f48"
OFT = "experiments/robot/openvla_utils.py of openvla-oft 213c5ff8"
OFT_CONSTANTS = "prismatic/vla/constants.py of openvla-oft 213c5ff8"
OPENPI_IMAGES = "SITE/openpi_client/image_tools.py of openpi-client 0.1.2"
OPENPI = "src/openpi/transforms.py of openpi 15a9616a"
OPENPI_LIBERO = "examples/libero/main.py of openpi 15a9616a"
LEROBOT_IMAGES = "SITE/lerobot/policies/common/vla_utils.py of lerobot 0.6.1"
SMOLVLA = "SITE/lerobot/policies/smolvla/modeling_smolvla.py of lerobot 0.6.1"
NORMALISE = "SITE/lerobot/processor/normalize_processor.py of lerobot 0.6.1"
LIBERO_STEP = "SITE/lerobot/processor/env_processor.py of lerobot 0.6.1"
N1_5 = "gr00t/experiment/data_config.py of Isaac-GR00T 16a6d6e1"
N1_7 = "SITE/lerobot/policies/groot/processor_groot.py of lerobot 0.6.1"
VLA_EVAL = "SITE/vla_eval/protocol/messages.py of vla-eval 0.8.0"
VLA_EVAL_LIBERO = "SITE/vla_eval/benchmarks/libero/benchmark.py of vla-eval 0.8.0"
OUR_MODEL = "src/vla_rl/plugins/models/film_resnet/inputs.py"
LIBERO_STATE = "position, rotation vector, 2 finger joints"
AS_LIBERO = "the state of libero"

MODEL_ROWS = (
    ("resize", "openvla", "stretched, Pillow bicubic", "", OPENVLA),
    ("resize", "openvla, center_crop", "crop_and_resize of TensorFlow: bilinear, not antialiased, truncated at x 255.5", "", OFT),
    ("resize", "pi0, pi05", "aspect kept, black around, Pillow bilinear", "", OPENPI_IMAGES),
    ("resize", "pi0, pi05 in lerobot", "aspect kept, black around, torch bilinear not antialiased: other levels than openpi's", "", LEROBOT_IMAGES),
    ("resize", "smolvla", "aspect kept, black on the left and top, torch bilinear not antialiased", "", LEROBOT_IMAGES),
    ("resize", "gr00t N1.5", "stretched, torchvision bilinear antialiased on uint8", "", N1_5),
    ("resize", "gr00t N1.7", "shortest edge by OpenCV INTER_AREA, crop, INTER_AREA again", "", N1_7),
    ("resize", "film_resnet", "ours alone", "", OUR_MODEL),
    ("crop", "openvla", "none in training without image_aug", "", OPENVLA),
    ("crop", "openvla, center_crop", "the middle 0.9 of the area, sqrt(0.9) = 0.949 of each side", "", OFT),
    ("crop", "pi0, pi05", "none in evaluation", "", OPENPI_LIBERO),
    ("crop", "smolvla", "none", "", SMOLVLA),
    ("crop", "gr00t N1.5", "the middle 0.95 of each side", "", N1_5),
    ("crop", "gr00t N1.7", "the middle crop_fraction (0.95) of each side, floored", "", N1_7),
    ("crop", "film_resnet", "ours alone", "", OUR_MODEL),
    ("normalisation", "openvla", "DINOv2's mean and std, then SigLIP's 0.5: six channels", "", OPENVLA),
    ("normalisation", "openvla, center_crop", "the same", "", OPENVLA),
    ("normalisation", "pi0, pi05", "[-1, 1]", "", "src/openpi/models/model.py of openpi 15a9616a"),
    ("normalisation", "smolvla", "[-1, 1]", "", SMOLVLA),
    ("normalisation", "gr00t N1.5", "[-1, 1]", "", N1_5),
    ("normalisation", "gr00t N1.7", "[-1, 1]", "", N1_7),
    ("normalisation", "film_resnet", "ours alone", "", OUR_MODEL),
    ("state order", "openvla_oft on LIBERO", LIBERO_STATE, AS_LIBERO, "experiments/robot/libero/run_libero_eval.py of openvla-oft 213c5ff8"),
    ("state order", "pi0, pi05 on LIBERO", LIBERO_STATE, AS_LIBERO, OPENPI_LIBERO),
    ("state order", "smolvla on LIBERO", LIBERO_STATE, AS_LIBERO, LIBERO_STEP),
    ("state order", "vla-eval on LIBERO", LIBERO_STATE, AS_LIBERO, VLA_EVAL_LIBERO),
    ("action order and bounds", "openvla", "position, rotation vector, gripper; id V - 1 - i is bin i, from q01 up", "", OPENVLA_MODEL),
    ("action order and bounds", "pi0", "z-scores of the data's order", "", OPENPI),
    ("action order and bounds", "pi05", "quantiles of the data's order", "", OPENPI),
    ("action order and bounds", "smolvla", "z-scores of the data's order", "", NORMALISE),
    ("action order and bounds", "gr00t", "smallest and largest number of the data, by key", "", N1_7),
    ("gripper", "openvla, gripper: rlds", "sign(2 g - 1), then negated: data 0 is closed", "", OPENVLA_EVALUATION),
    ("gripper", "openvla, gripper: widowx", "2 (g > 0.5) - 1: data 0 is closed", "", "rlinf/envs/action_utils.py of RLinf 8db28ac4"),
    ("gripper", "openvla, gripper: keep", "as the data", "", OPENVLA_MODEL),
    ("gripper", "pi0, pi05", "as the data: openpi's LIBERO set has -1 for open", "", OPENPI_LIBERO),
    ("gripper", "smolvla", "as the data", "", NORMALISE),
    ("gripper", "gr00t, gripper: libero", "1 - 2 g, its sign: data 0 is closed", "", "examples/Libero/eval/utils.py of Isaac-GR00T 4e91b697"),
    ("gripper", "gr00t, gripper: as_is", "as the data", "", N1_7),
    ("executed steps", "openvla", "1 of 1", "rollout.chunk", OPENVLA_EVALUATION),
    ("executed steps", "openvla_oft", "8 of 8 on LIBERO, 25 of 25 on ALOHA", "rollout.chunk", OFT_CONSTANTS),
    ("executed steps", "pi0, pi05", "5 of 10 or 50 on LIBERO (replan_steps)", "rollout.chunk, else n_action_steps", OPENPI_LIBERO),
    ("executed steps", "smolvla", "n_action_steps, 50 of 50", "rollout.chunk, else n_action_steps", "SITE/lerobot/policies/smolvla/configuration_smolvla.py of lerobot 0.6.1"),
    ("executed steps", "openpi", "the whole chunk is sent, the client chooses", "", OPENPI_LIBERO),
    ("executed steps", "roboarena", "all that are sent", "", "policy_server.py of roboarena 6fa329f"),
    ("executed steps", "vla-eval", "one, or a chunk that the harness plays", "", VLA_EVAL),
    ("message", "openpi", "msgpack map, keys with slashes, arrays as maps with bytes for keys", "", "SITE/openpi_client/msgpack_numpy.py of openpi-client 0.1.2"),
    ("message", "roboarena", "openpi's, with `endpoint`", "", "policy_server.py of roboarena 6fa329f"),
    ("message", "vla-eval", "msgpack envelope of type, payload, seq, timestamp; images as PNG unless told otherwise", "", VLA_EVAL),
)  # fmt: skip
