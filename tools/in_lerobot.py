"""Runs in an interpreter with lerobot (Python 3.12, `pip install 'lerobot[dataset,pi,smolvla]'`), not in ours:

    PYTHON tools/in_lerobot.py dataset FOLDER ROWS.npz               every row as lerobot's LeRobotDataset gives it
    PYTHON tools/in_lerobot.py resume FOLDER ROWS.npz                the same after lerobot has appended two episodes
    PYTHON tools/in_lerobot.py policy FOLDER SEEN.npz ACTIONS.npz    what lerobot's policy does with our checkpoint
    PYTHON tools/in_lerobot.py evaluate FOLDER SEEN.npz ACTIONS.npz  what `lerobot-eval` executes, a step for each row

`tests/tools/test_in_lerobot.py` compares both with ours, where VLA_RL_LEROBOT_PYTHON names such an interpreter.
Networks that are not of public sizes, which lerobot's config.json cannot describe, are given the sizes of our
architecture.json; tokenizers, which lerobot takes from the hub, are the folder's own. All else is lerobot's own code.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file

INDEX = re.compile(r"timestamp|(frame_|episode_|task_)?index")
"""Features that lerobot numbers by itself."""


def dataset(folder: Path, target: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset("local/data", root=folder)
    rows = [data[i] for i in range(len(data))]
    arrays = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0] if name != "task"}
    stats = {f"stats/{name}": np.asarray(one["mean"]) for name, one in data.meta.stats.items()}
    counts = np.array([data.num_episodes, data.meta.total_frames, data.fps])
    np.savez(target, tasks=np.array([row["task"] for row in rows]), counts=counts, **arrays, **stats)


def resume(folder: Path, target: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset.resume("local/data", root=folder)
    given = {name: about for name, about in data.meta.features.items() if not INDEX.fullmatch(name)}
    for episode in range(2):
        for row in range(3 + episode):
            frame: dict[str, Any] = {"task": f"appended {episode}"}
            for name, about in given.items():
                kind = "uint8" if about["dtype"] == "image" else about["dtype"]
                frame[name] = np.full(about["shape"], row % 2 if kind == "bool" else row, kind)
            data.add_frame(frame)
        data.save_episode()
    data.finalize()
    dataset(folder, target)


def policy(folder: Path, seen: Path, target: Path) -> None:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    torch.use_deterministic_algorithms(True)
    config = PreTrainedConfig.from_pretrained(folder)
    config.device = "cpu"
    with sizes_of(folder, config):
        model = get_policy_class(config.type).from_pretrained(folder, config=config)
    check_loaded(model, folder)
    overrides = {"tokenizer_processor": {"tokenizer": read_tokenizer(folder, config.type)}}
    before, after = make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)
    given = np.load(seen, allow_pickle=False)
    found = []
    for row, task in enumerate(given["tasks"].tolist()):
        batch: dict[str, Any] = {"task": task, "observation.state": torch.from_numpy(given["state"][row])}
        for name in config.image_features:
            image = torch.from_numpy(given[name][row]).permute(2, 0, 1).float() / 255
            batch[name] = image
        noise = torch.from_numpy(given["noise"])
        chunk = model.predict_action_chunk(before(batch), noise=noise)
        found.append(np.stack([after(action).numpy()[0] for action in chunk.transpose(0, 1)]))
    np.savez(target, actions=np.stack(found))


def evaluate(folder: Path, seen: Path, target: Path) -> None:
    """Run the command itself on a simulator that shows one row after another, with noise of zeros."""
    import gymnasium as gym
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.configs import EnvConfig
    from lerobot.policies.factory import get_policy_class
    from lerobot.scripts.lerobot_eval import eval_main

    given = np.load(seen, allow_pickle=False)
    config = PreTrainedConfig.from_pretrained(folder)
    rows, cameras = len(given["tasks"]), {name: name.rpartition(".")[2] for name in config.image_features}
    executed: list[np.ndarray] = []

    class Rows(gym.Env):
        metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
        render_mode = "rgb_array"
        _max_episode_steps = rows
        task = task_description = str(given["tasks"][0])
        action_space = gym.spaces.Box(-np.inf, np.inf, config.action_feature.shape)
        observation_space = gym.spaces.Dict(
            agent_pos=gym.spaces.Box(-np.inf, np.inf, given["state"].shape[1:]),
            pixels=gym.spaces.Dict(
                {camera: gym.spaces.Box(0, 255, given[name].shape[1:], np.uint8) for name, camera in cameras.items()}
            ),
        )

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.row = 0
            return self.show_row(), {}

        def step(self, action: np.ndarray) -> Any:
            executed.append(action.copy())
            self.row += 1
            return self.show_row(), 0.0, self.row == rows, False, {"is_success": False}

        def show_row(self) -> Any:
            row = min(self.row, rows - 1)
            pixels = {camera: given[name][row] for name, camera in cameras.items()}
            return {"agent_pos": given["state"][row], "pixels": pixels}

        def render(self) -> np.ndarray:
            return np.zeros((16, 16, 3), np.uint8)

    shown = {name: PolicyFeature(FeatureType.VISUAL, given[name].shape[1:]) for name in cameras}
    shown["action"] = PolicyFeature(FeatureType.ACTION, config.action_feature.shape)

    @EnvConfig.register_subclass("rows")
    @dataclass
    class RowsConfig(EnvConfig):
        def __post_init__(self) -> None:
            self.features, self.features_map = shown, {name: name for name in shown}

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            return {}

        def create_envs(self, n_envs: int, use_async_envs: bool = False) -> Any:
            mode = gym.vector.AutoresetMode.SAME_STEP
            return {"rows": {0: gym.vector.SyncVectorEnv([Rows] * n_envs, autoreset_mode=mode)}}

    model = get_policy_class(config.type).__module__
    sys.argv = ["lerobot-eval", f"--policy.path={folder}", "--policy.device=cpu", "--env.type=rows"]
    sys.argv += ["--eval.n_episodes=1", "--eval.batch_size=1", f"--output_dir={target.parent / 'evaluation'}"]
    with (
        sizes_of(folder, config),
        mock.patch(f"{model}.sample_noise", lambda shape, device: torch.zeros(shape, device=device)),
        mock.patch(
            "lerobot.processor.tokenizer_processor.AutoTokenizer.from_pretrained",
            return_value=read_tokenizer(folder, config.type),
        ),
    ):
        eval_main()
    np.savez(target, actions=np.stack(executed))


def read_tokenizer(folder: Path, kind: str) -> Any:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")
    if kind.startswith("pi"):  # as PaliGemma's on the hub begins every text
        bos = tokenizer.convert_tokens_to_ids("<bos>")
        begun = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
        tokenizer.backend_tokenizer.post_processor = begun
    return tokenizer


def check_loaded(model: torch.nn.Module, folder: Path) -> None:
    """lerobot only prints what it could not load, and which of its parameters the file lacks."""
    state, given = model.state_dict(), load_file(folder / "model.safetensors")
    for name, tensor in given.items():
        assert torch.equal(state[name], tensor), f"{name} was not loaded"
    lacking = [
        name
        for name, parameter in model.named_parameters()
        if name not in given and not any(torch.equal(parameter, tensor) for tensor in given.values())
    ]
    assert not lacking, f"{lacking} are random"


def sizes_of(folder: Path, config: Any) -> Any:
    """In this context lerobot builds the network with the sizes of the folder's architecture.json, if any."""
    if not (folder / "architecture.json").is_file():
        return mock.patch.dict({})
    sizes = SimpleNamespace(**json.loads((folder / "architecture.json").read_text()))
    return _smolvla(sizes, config) if config.type == "smolvla" else _pi(sizes, config.type)


def _pi(sizes: Any, kind: str) -> Any:
    from importlib import import_module

    module = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    built = module.PaliGemmaForConditionalGenerationWithPiGemma
    expert = module.PiGemmaForCausalLM

    def gemma(variant: str) -> Any:
        text = variant == "gemma_2b"
        width, mlp = (sizes.text_width, sizes.text_mlp) if text else (sizes.expert_width, sizes.expert_mlp)
        return module.GemmaConfig(width, sizes.depth, mlp, sizes.heads, sizes.kv_heads, sizes.head_dim)

    def paligemma(config: Any) -> Any:
        vision = {
            "hidden_size": sizes.vision_width,
            "intermediate_size": sizes.vision_mlp,
            "num_hidden_layers": sizes.vision_depth,
            "num_attention_heads": sizes.vision_heads,
            "image_size": sizes.image_size,
            "patch_size": sizes.patch_size,
            "projection_dim": sizes.text_width,
        }
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        config.text_config.vocab_size = sizes.vocab
        config.projection_dim, config.image_token_id = sizes.text_width, sizes.vocab
        return built(config=config)

    def small(config: Any) -> Any:
        config.vocab_size = sizes.vocab
        return expert(config=config)

    return mock.patch.multiple(
        module,
        get_gemma_config=gemma,
        PaliGemmaForConditionalGenerationWithPiGemma=paligemma,
        PiGemmaForCausalLM=small,
    )


def _smolvla(sizes: Any, policy: Any) -> Any:
    from lerobot.policies.smolvla import smolvlm_with_expert as module
    from transformers import SmolVLMConfig

    policy.expert_width_multiplier = sizes.expert_width / sizes.text_width
    policy.num_vlm_layers, policy.self_attn_every_n_layers = sizes.depth, sizes.alternate
    config = SmolVLMConfig(
        scale_factor=sizes.shuffle,
        pad_token_id=0,
        image_token_id=sizes.vocab - 1,
        vision_config={
            "hidden_size": sizes.vision_width,
            "intermediate_size": sizes.vision_mlp,
            "num_hidden_layers": sizes.vision_depth,
            "num_attention_heads": sizes.vision_heads,
            "image_size": sizes.image_size,
            "patch_size": sizes.patch_size,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": sizes.text_width,
            "intermediate_size": sizes.text_mlp,
            "num_hidden_layers": sizes.depth,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": 1e-5,  # as config.json of the public SmolVLM2 says; LlamaConfig's default is 1e-6
            "vocab_size": sizes.vocab,
            "pad_token_id": 0,
        },
    )
    words = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))
    return mock.patch.multiple(
        module,
        AutoConfig=SimpleNamespace(from_pretrained=lambda name: config),
        AutoProcessor=SimpleNamespace(from_pretrained=lambda name: words),
        get_intermediate_size=lambda width: sizes.expert_mlp,
    )


if __name__ == "__main__":
    commands = {"dataset": dataset, "resume": resume, "policy": policy, "evaluate": evaluate}
    commands[sys.argv[1]](*map(Path, sys.argv[2:]))
