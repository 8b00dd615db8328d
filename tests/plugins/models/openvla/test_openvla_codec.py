"""Actions and tokens, instructions and tokens."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fork_server import ForkServer
from vla_rl.plugins.models.openvla.architecture import preset_config
from vla_rl.plugins.models.openvla.codec import ActionCodec, ActionScale
from vla_rl.plugins.models.openvla.prompts import DecodingPrompts, train_tokenizer

CPU = torch.device("cpu")
UNIT = ActionCodec(ActionScale.from_bounds([-1.0], [1.0]), vocab_end=32000, bins=256, device=CPU)


def test_tokens_by_hand() -> None:
    tokens = torch.tensor([[31999], [31872], [31745], [31744]])
    assert UNIT.decode_tokens(tokens).flatten().tolist() == pytest.approx(
        [-254 / 255, 0.0, 254 / 255, 254 / 255], abs=1e-6
    )
    actions = torch.tensor([[-1.0], [-3.0], [0.0], [0.999], [1.0], [3.0]])
    # 1.0 stays below the last edge because of the 1e-8; values beyond the range are clipped to it
    assert UNIT.encode_actions(actions).flatten().tolist() == [31999, 31999, 31872, 31745, 31745, 31744]


def test_dimensions_outside_the_mask_pass_unscaled() -> None:
    codec = ActionCodec(ActionScale(q01=(0.0, 0.0), q99=(10.0, 10.0), mask=(True, False)), 32000, 256, CPU)
    actions = torch.tensor([[7.5, 0.5]])
    tokens = codec.encode_actions(actions)
    assert tokens[0, 0] == tokens[0, 1]
    torch.testing.assert_close(codec.decode_tokens(tokens), actions, rtol=0, atol=5 / 255 + 1e-6)


def test_statistics_without_a_mask_scale_everything() -> None:
    assert ActionScale.from_entry({"q01": [0, 0], "q99": [1, 1]}).mask == (True, True)


def test_gripper_of_rlds_data_sets() -> None:
    """0 closed, 1 open there; -1 open, +1 closed in the simulator."""
    codec = ActionCodec(
        ActionScale(q01=(0.0, 0.0), q99=(1.0, 1.0), mask=(True, False)), 32000, 256, CPU, gripper="rlds"
    )
    said = torch.tensor([[0.0, -0.4], [0.0, 0.3], [0.0, 0.9]], dtype=torch.float64)
    assert codec.restore_actions(said).tolist() == [[0.5, 1.0], [0.5, 1.0], [0.5, -1.0]]
    actions = torch.tensor([[0.25, 1.0], [0.25, -1.0]])
    tokens = codec.encode_actions(actions)
    assert tokens[:, 1].tolist() == [32000 - 128, 32000 - 256]  # said as 0 and as 1
    torch.testing.assert_close(codec.decode_tokens(tokens), actions, rtol=0, atol=1 / 255)


def test_gripper_of_the_widowx() -> None:
    """The same data; -1 closed, +1 open in the simulator."""
    codec = ActionCodec(
        ActionScale(q01=(0.0, 0.0), q99=(1.0, 1.0), mask=(True, False)), 32000, 256, CPU, gripper="widowx"
    )
    output = torch.tensor([[0.0, -0.4], [0.0, 0.5], [0.0, 0.9]], dtype=torch.float64)
    assert codec.restore_actions(output).tolist() == [[0.5, -1.0], [0.5, -1.0], [0.5, 1.0]]
    actions = torch.tensor([[0.25, 1.0], [0.25, -1.0]])
    torch.testing.assert_close(codec.decode_tokens(codec.encode_actions(actions)), actions, rtol=0, atol=1 / 255)


def test_plain_openvla_restores_without_the_1e_8() -> None:
    unit = torch.tensor([[1.0]], dtype=torch.float64)
    scale = ActionScale.from_bounds([0.0], [1e-7])
    plain, oft = (
        ActionCodec(scale, 32000, 256, CPU, epsilon=epsilon).restore_actions(unit).item() for epsilon in (0.0, 1e-8)
    )
    assert plain == pytest.approx(1e-7, rel=1e-6)
    assert oft == pytest.approx(1.1e-7, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    low=st.floats(-5, 5),
    span=st.floats(0.01, 10),
    at=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_round_trip(low: float, span: float, at: list[float]) -> None:
    codec = ActionCodec(ActionScale.from_bounds([low], [low + span]), vocab_end=768, bins=256, device=CPU)
    actions = torch.tensor([[low + span * x] for x in at], dtype=torch.float64)
    tokens = codec.encode_actions(actions)
    assert int(tokens.min()) >= 512 and int(tokens.max()) < 768
    decoded = codec.decode_tokens(tokens)
    assert (decoded - actions).abs().max() <= span / 255 / 2 * 1.001 + 1e-5
    assert torch.equal(codec.decode_tokens(codec.encode_actions(decoded)), decoded)


def test_every_token_survives_but_the_one_that_shares_its_centre() -> None:
    tokens = torch.arange(31744, 32000)[:, None]
    again = UNIT.encode_actions(UNIT.decode_tokens(tokens))
    assert torch.equal(again[1:], tokens[1:])
    assert int(again[0]) == 31745


TEXTS = ["push the red block", "Pick up the BLUE bowl, then stop"]


def prompts(stop: bool = True) -> DecodingPrompts:
    sizes = preset_config("fast")
    return DecodingPrompts(
        train_tokenizer(TEXTS, sizes),
        placeholders=6,
        append_stop_token=stop,
        pad_id=768,
        device=CPU,
        instructions=TEXTS,
    )


def test_tokenizer_keeps_the_layout_of_the_real_one() -> None:
    tokenizer = prompts().tokenizer
    assert [tokenizer.token_to_id(t) for t in ("<unk>", "<s>", "</s>", "<PAD>")] == [0, 1, 2, 768]
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 769
    text = "In: What action should the robot take to find Ömer's straße 山?\nOut:"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompt_ends_with_the_lone_space_and_is_lower_case() -> None:
    p = prompts()
    ids = p.encode_instruction(TEXTS[1])
    assert ids[0] == 1
    assert ids[-1] == p.tokenizer.token_to_id("▁")
    wanted = "In: What action should the robot take to pick up the blue bowl, then stop?\nOut: "
    assert p.tokenizer.decode(ids) == wanted
    words = [p.tokenizer.id_to_token(i) for i in ids]
    assert {"▁blue", "▁bowl", ","} <= set(words)


def test_rows_are_prompt_placeholders_stop_padding() -> None:
    p = prompts()
    batch = p.take_prompts([TEXTS[0]] * 2)
    length = len(p.encode_instruction(TEXTS[0]))
    assert batch.ids.shape[1] == len(p.encode_instruction(TEXTS[1])) + 6 + 1
    assert batch.start.tolist() == [length - 1] * 2
    assert batch.placeholder[0].nonzero().flatten().tolist() == list(range(length, length + 6))
    assert batch.ids[0, length + 6] == 2
    assert batch.mask is not None
    assert batch.mask[0].sum() == length + 7
    assert prompts(stop=False).take_prompts(TEXTS[:1]).ids.shape[1] == batch.ids.shape[1] - 1


def test_new_instructions_are_learnt_and_old_rows_stay() -> None:
    p = prompts()
    before = p.take_prompts(TEXTS)
    longer = p.take_prompts([TEXTS[1], "push the red block onto the green pad and then stop for a while"])
    after = p.take_prompts(TEXTS)
    width = before.ids.shape[1]
    assert longer.ids.shape[1] == after.ids.shape[1] > width
    assert torch.equal(after.ids[:, :width], before.ids)
    assert torch.equal(after.start, before.start)


def test_tokenizer_is_the_same_in_every_process(fork_server: ForkServer) -> None:
    """The other process has another seed of hashes."""
    code = (
        "from hashlib import sha256; from vla_rl.plugins.models.openvla.architecture import preset_config as c; "
        "from vla_rl.plugins.models.openvla.prompts import train_tokenizer as t; "
        f"print(sha256(t({TEXTS}, c('fast')).to_str().encode()).hexdigest())"
    )
    other = fork_server.run_python("-c", code, check=True).stdout
    own = sha256(train_tokenizer(TEXTS[::-1], preset_config("fast")).to_str().encode()).hexdigest()
    assert other == f"{own}\n"
