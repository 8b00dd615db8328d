"""Folders of checkpoints whose files hold other things than they should: one sentence that names the file, the key and
what is expected, from `check` or from `build` of its plugin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import film_resnet_cases
import gr00t_cases
import openvla_cases
import pi0_cases
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from vla_rl.core.contexts import ModelContext
from vla_rl.core.declarations import ModelPlugin
from vla_rl.core.errors import UserError
from vla_rl.core.spec.structure import Problems
from vla_rl.plugins.models import film_resnet, gr00t, openvla, pi0, smolvla
from vla_rl.plugins.models.smolvla.config import SmolVLAConfig
from vla_rl.testing import synthetic

ENV = synthetic.env_info()
HUGE = 10**30
NAN = float("nan")
MISSING = object()
TAG = "new_embodiment"
N1_7_PART = ("processor_kwargs", "modality_configs", TAG)
NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
CONTEXT = ModelContext(env=ENV, chunk=4)
Case = tuple[str, Sequence[str | int], Any, str]


def save_pi0(folder: Path) -> None:
    pi0_cases.policy().save(folder)


def save_smolvla(folder: Path) -> None:
    smolvla.plugin.build(SmolVLAConfig(preset="tiny"), CONTEXT).save(folder)


def save_n1_7(folder: Path) -> None:
    gr00t_cases.policy(preset="tiny_n1_7").save(folder)


def save_film_resnet(folder: Path) -> None:
    film_resnet_cases.policy().save(folder)


def save_oft(folder: Path) -> None:
    openvla_cases.policy(unnorm_key="table").save(folder)


MODELS: dict[str, tuple[Callable[[Path], Any], ModelPlugin, list[Case]]] = {
    "pi0": (
        save_pi0,
        pi0.plugin,
        [
            ("config.json", ["chunk_size"], {"a": 1}, "'chunk_size' is a mapping, a whole number from 1 to 4,096"),
            ("config.json", ["chunk_size"], HUGE, "'chunk_size' is int 1000"),
            ("config.json", ["min_period"], {"a": 1}, "'min_period' is a mapping, a number from 1e-06 to 1e"),
            ("config.json", ["max_state_dim"], "", "'max_state_dim' is str '', a whole number from 1"),
            ("config.json", ["tokenizer_max_length"], [None], "'tokenizer_max_length' is a list"),
            ("config.json", ["input_features"], 3, "'input_features' is int 3, a JSON object"),
            ("config.json", ["use_relative_actions"], "no", "'use_relative_actions' is str 'no', true or false"),
            ("architecture.json", ["vision_heads"], 5, r"'vision_width' is 48, a multiple of 'vision_heads' \(5\)"),
            ("architecture.json", ["patch_size"], 0, "'patch_size'"),
            ("architecture.json", ["expert_mlp"], 1 << 20, r"does not fit.*of another shape"),
            ("policy_preprocessor.json", ["steps", 5, "config", "eps"], NAN, "'eps' is float nan, a number from 0"),
            ("policy_preprocessor.json", ["steps", 5, "state_file"], None, "'state_file' is nothing, a text"),
            (
                "policy_preprocessor.json",
                ["steps", 5, "config", "norm_map", "ACTION"],
                [],
                "'ACTION' is a list, a text",
            ),
        ],
    ),
    "smolvla": (
        save_smolvla,
        smolvla.plugin,
        [
            ("config.json", ["chunk_size"], True, "'chunk_size' is bool True"),
            ("config.json", ["max_period"], NAN, "'max_period' is float nan"),
            ("config.json", ["max_action_dim"], HUGE, "'max_action_dim' is int 1000"),
            ("architecture.json", ["alternate"], 0, "'alternate' is 0, a whole number from 1"),
            ("architecture.json", ["shuffle"], 3, "'shuffle' is 3, a divisor of the 8 patches"),
            ("architecture.json", ["text_width"], 65, "'text_width' is 65, a multiple of 'heads'"),
            ("architecture.json", MISSING, [], "holds a list, a JSON object"),
        ],
    ),
    "gr00t_n1_5": (
        gr00t_cases.folder_with,
        gr00t.plugin,
        [
            ("config.json", ["action_head_cfg"], "x", "'action_head_cfg' is str 'x', a JSON object"),
            ("config.json", ["action_head_cfg", "action_horizon"], None, "'action_horizon' is nothing"),
            ("config.json", ["action_head_cfg", "action_horizon"], 4000, "'action_horizon' is 4000.*256 positions"),
            ("config.json", ["action_head_cfg", "diffusion_model_cfg"], [1], "'diffusion_model_cfg' is a list"),
            ("architecture.json", ["dit_heads"], 5000, "of another shape"),
            ("experiment_cfg/metadata.json", ["new_embodiment"], [1], "'new_embodiment' is a list"),
            ("experiment_cfg/metadata.json", ["new_embodiment", "statistics", "action"], 3, "'action' is int 3"),
            (
                "experiment_cfg/metadata.json",
                ["new_embodiment", "statistics", "action", "move", "max"],
                [1, NAN],
                r"'max\[1\]' is float nan, a number",
            ),
            (
                "experiment_cfg/metadata.json",
                ["new_embodiment", "statistics", "action", "move", "max"],
                [1.0],
                "move has 2 numbers of 'min' and 1 of 'max'",
            ),
        ],
    ),
    "gr00t_n1_7": (
        save_n1_7,
        gr00t.plugin,
        [
            ("config.json", ["max_state_dim"], "", "'max_state_dim' is str ''"),
            ("architecture.json", ["rope"], [1], r"'rope' is \[1\], three parts of 8"),
            ("architecture.json", ["merge"], 0, "'merge' is 0, a divisor"),
            ("processor_config.json", ["processor_kwargs"], 1, "'processor_kwargs' is int 1, a JSON object"),
            ("processor_config.json", [*N1_7_PART, "action", "delta_indices"], "x", "'delta_indices' is str 'x'"),
            ("processor_config.json", [*N1_7_PART, "state", "modality_keys"], [1], r"'modality_keys\[0\]' is int 1"),
            ("processor_config.json", ["processor_kwargs", "crop_fraction"], 2, "'crop_fraction' is int 2"),
            ("embodiment_id.json", [TAG], "x", "is str 'x', a whole number"),
            ("embodiment_id.json", [TAG], 99, "has row 99, and the network 32 rows"),
            ("statistics.json", [TAG, "state"], True, "'state' is bool True, a JSON object"),
        ],
    ),
    "film_resnet": (
        save_film_resnet,
        film_resnet.plugin,
        [
            ("config.json", ["network", "blocks"], HUGE, "network.blocks: expected a number of 63 bits at most"),
            ("config.json", ["network", "channels"], "x", "network.channels: expected a list"),
            ("config.json", ["cameras"], {"a": 1}, "cameras: expected a list"),
            ("config.json", ["chunk"], MISSING, "chunk: required"),
            ("statistics.json", ["action", "mode"], "none", "'mode' is 'none', one of MEAN_STD"),
            (
                "statistics.json",
                ["action", "values"],
                [[0.0], [1.0, 2.0]],
                "'values' is 2 lists of 1, 2 numbers, 2 of 3",
            ),
            ("statistics.json", ["action", "values", 1, 0], NAN, "expected a finite number"),
        ],
    ),
    "openvla_oft": (
        save_oft,
        openvla.openvla_oft,
        [
            ("config.json", ["n_action_bins"], None, "'n_action_bins' is nothing, a whole number from 2"),
            ("config.json", ["pad_token_id"], MISSING, "'pad_token_id' is missing, a whole number from 0 to"),
            ("config.json", ["image_sizes"], [64], "'image_sizes' is a list, a list of two"),
            ("config.json", ["image_resize_strategy"], "", "'image_resize_strategy' is str '', one of resize-naive"),
            ("config.json", ["policy_setup", "decoding"], [], "'decoding' is a list, a text"),
            ("config.json", ["policy_setup", "chunk"], "4", "'chunk' is str '4', a whole number"),
            ("config.json", ["text_config", "intermediate_size"], -1, "'intermediate_size' is int -1"),
            ("config.json", ["text_config", "hidden_act"], "text", "'hidden_act' 'text' is not known"),
            ("config.json", ["vision_specs", 0, "patch_size"], 7, "'patch_size' is 7, a divisor of 64"),
            ("dataset_statistics.json", ["table", "action"], 3, "'action' is int 3, a JSON object"),
            ("dataset_statistics.json", ["table", "action", "q01", 0], NAN, r"'q01\[0\]' is float nan"),
            ("dataset_statistics.json", ["table", "action", "q99"], [1.0], "lists of different lengths"),
        ],
    ),
}


def configured(plugin: ModelPlugin, folder: Path) -> Any:
    return plugin.config(checkpoint=str(folder))  # type: ignore[call-arg]


def refusal(plugin: ModelPlugin, folder: Path) -> str:
    """What check says, or else build."""
    config = configured(plugin, folder)
    with pytest.raises((Problems, UserError)) as caught:
        assert plugin.check is not None
        plugin.check(config, CONTEXT)
        plugin.build(config, CONTEXT)
    return str(caught.value)


def changed(content: Any, path: Any, value: Any) -> Any:
    if path is MISSING:
        return value
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


@pytest.mark.parametrize("name", MODELS)
def test_keys_of_other_types_and_sizes(name: str, tmp_path: Path) -> None:
    save, plugin, cases = MODELS[name]
    folder = tmp_path / "model"
    save(folder)
    for file, path, value, message in cases:
        whole = (folder / file).read_text()
        (folder / file).write_text(json.dumps(changed(json.loads(whole), path, value)))
        text = refusal(plugin, folder)
        assert str(folder) in text, (file, path)
        assert re.search(message, text, re.DOTALL), text
        (folder / file).write_text(whole)
    plugin.build(configured(plugin, folder), CONTEXT)  # as it was before


def test_files_that_are_cut_off_or_hold_something_else(tmp_path: Path) -> None:
    save_pi0(tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "policy_preprocessor.json", NORMALIZER):
        whole = (tmp_path / name).read_bytes()
        for content in (whole[: len(whole) // 2], b"\0" * 64, b""):
            (tmp_path / name).write_bytes(content)
            assert re.search(f"cannot read .*{name}", refusal(pi0.plugin, tmp_path))
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "model.safetensors").unlink()
    for shard, message in (("gone.safetensors", "has no gone.safetensors"), ("x" * 300, "not inside"), (3, "is int 3")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        assert re.search(message, refusal(pi0.plugin, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values[:-1].clone(), "has 3 numbers of 'action.min' and 2 of 'action.max'"),
        (lambda values: values * NAN, r"'action.max\[0\]' is nan, a number"),
        (
            lambda values: values - 9,
            r"'action.max\[0\]' is -8\.\d+, below the -0\.2\d* of 'action.min\[0\]': not a range",
        ),
    ],
)
def test_statistics_that_cannot_scale(tmp_path: Path, change: Callable[[Tensor], Tensor], message: str) -> None:
    save_smolvla(tmp_path)
    tensors = load_file(tmp_path / NORMALIZER)
    save_file({**tensors, "action.max": change(tensors["action.max"])}, tmp_path / NORMALIZER)
    assert re.search(f"{NORMALIZER}.*{message}", refusal(smolvla.plugin, tmp_path))
