from __future__ import annotations

import types

import attrs
import pytest
import torch

from vla_rl.core.capabilities import (
    ActionTokens,
    Capturable,
    Compilable,
    ContinuesChunks,
    HasCritic,
    HasFeatures,
    HasReference,
    Offloadable,
    Reparameterised,
    Steerable,
    TrainsInParts,
    require_capability,
)
from vla_rl.core.catalogue import KINDS, build
from vla_rl.core.errors import PluginError, UserError
from vla_rl.core.hookspecs import VLAModel
from vla_rl.core.manager import check_module, hook_names, hookimpl, with_capabilities, wrap
from vla_rl.testing import synthetic
from vla_rl.testing.linear import LinearModel
from vla_rl.testing.models import check_model

INFO = synthetic.env_info()


class Bare(VLAModel):
    """A model that has its duties alone."""

    sample_chunk = chunk_log_probs = imitation_loss = save = lambda self: None
    module = torch.nn.Linear(2, 2)


class Encodes(Bare):
    def encode_actions(self, actions):
        return actions


class NoHead(Bare, HasCritic):
    def values(self, obs):
        return torch.zeros(len(obs))


def test_every_capability_belongs_to_a_kind_of_plugin():
    known = {capability for kind in KINDS.values() for capability in kind.capability_classes}
    model = {HasCritic, HasReference, ActionTokens, HasFeatures, Reparameterised, Steerable, ContinuesChunks}
    assert known == model | {Compilable, Capturable, Offloadable, TrainsInParts}
    assert {"sample_chunk", "values", "steering_noise"} <= set(hook_names(with_capabilities("model")))
    assert "values" not in hook_names(VLAModel)


def test_a_wrapped_component_has_the_capabilities_of_its_class():
    model = wrap("model", LinearModel(INFO, 2), "linear")
    assert isinstance(model, VLAModel) and isinstance(model, HasCritic) and isinstance(model, ActionTokens)
    assert not isinstance(model, HasReference | Compilable | ContinuesChunks)
    assert not isinstance(wrap("model", Bare(), "bare"), HasCritic)
    assert not hasattr(wrap("model", Bare(), "bare"), "values")


def test_methods_of_capabilities_are_wrapped():
    @hookimpl(wraps="model")
    def decode_actions(tokens):
        return (yield) + 100

    hooks = types.ModuleType("hooks")
    hooks.decode_actions = decode_actions
    check_module("hooks", hooks)
    model = LinearModel(INFO, 2)
    tokens = torch.zeros(1, 2, 3, dtype=torch.long)
    wrapped = wrap("model", model, "linear", {"hooks": hooks})
    assert torch.equal(wrapped.decode_actions(tokens), model.decode_actions(tokens) + 100)


def test_a_method_of_a_capability_that_is_not_inherited_is_refused():
    text = (
        "plugin 'encodes': Encodes has encode_actions and does not inherit vla_rl.ActionTokens, so no one would call it; "
        "inherit that class, whose methods are encode_actions, decode_actions"
    )
    with pytest.raises(PluginError, match=text):
        wrap("model", Encodes(), "encodes")


def test_half_of_a_capability_is_refused_by_name_where_it_is_built(tmp_path):
    (tmp_path / "half.py").write_text(
        "import attrs, torch\n"
        "from vla_rl import ActionTokens, ModelPlugin, VLAModel\n"
        "class Half(VLAModel, ActionTokens):\n"
        "    sample_chunk = chunk_log_probs = imitation_loss = save = None\n"
        "    def encode_actions(self, actions): return actions\n"
        "@attrs.frozen(kw_only=True)\n"
        "class Config: pass\n"
        "plugin = ModelPlugin(config=Config, build=lambda config, context: Half(), summary='half')\n"
        "vla_rl_plugins = {'model': {'half': plugin}}\n"
    )
    with pytest.raises(TypeError, match=r"abstract class Half .*decode_actions") as caught:
        build("model", "half", None, attrs.NOTHING, [str(tmp_path / "half.py")])
    assert caught.value.__notes__ == ["in plugin 'half', building the model"]


def test_an_attribute_of_a_capability_is_required():
    text = "plugin 'headless': NoHead inherits vla_rl.HasCritic and has no attribute critic; set it"
    with pytest.raises(PluginError, match=text):
        wrap("model", NoHead(), "headless")
    headless = NoHead()
    headless.critic = None
    assert isinstance(wrap("model", headless, "headless"), HasCritic)


def test_claims_that_do_not_hold_are_found():
    class Eager(LinearModel):
        def __init__(self):
            super().__init__(INFO, 2, values="chunk")

    with pytest.raises(AssertionError, match="critic: expected None, got a module; leave it out where"):
        check_model(Eager(), env=INFO)

    class Layered(LinearModel, Compilable):
        blocks = (torch.nn.Conv2d,)

    with pytest.raises(AssertionError, match="blocks: expected classes of layers of `module`, got Conv2d"):
        check_model(Layered(INFO, 2), env=INFO)

    class Tokenless(Bare):
        tokens_per_action = LinearModel(INFO, 2).tokens_per_action
        module = LinearModel(INFO, 2).module

    with pytest.raises(UserError, match=r"trainer 'x' needs HasCritic, and Tokenless does not inherit it"):
        require_capability(wrap("model", Tokenless(), "tokenless"), HasCritic, "trainer 'x'")
