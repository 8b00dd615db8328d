"""`vla-rl models` lists the known checkpoints, and says of one who says what."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import vla_rl
from vla_rl.cli.main import app

OFT = "moojink/openvla-7b-oft-finetuned-libero-spatial"


def output(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["models", *words])
    assert result.exit_code == status, result.output
    return result.output


def test_the_table_has_every_row():
    text = output()
    for name in (
        "openvla/openvla-7b-finetuned-libero-goal",
        OFT,
        "lerobot/pi05_libero_finetuned",
        "nvidia/GR00T-N1.5-3B",
    ):
        assert name in text
    assert "None of them was run by us." in text


def test_one_row_says_who_says_what():
    text = output(OFT)
    assert "  model.head: l1\n      moojink/openvla-oft@213c5ff8 experiments/robot/libero/run_libero_eval.py:91" in text
    assert "keys with env.type: libero\n  model.cameras: [agentview, wrist]" in text
    assert f"    type: openvla_oft\n    checkpoint: {OFT}" in text


def test_json_is_what_python_gets():
    rows = json.loads(output("--json"))
    assert rows == vla_rl.known_checkpoints() and len(rows) >= 25
    assert json.loads(output(OFT, "--json"))["keys"]["model.gripper"]["value"] == "rlds"


def test_an_unknown_name_is_refused_with_the_nearest():
    assert "did you mean 'openvla/openvla-7b-finetuned-libero-goal'?" in output(
        "openvla/openvla-7b-finetuned-libero-gaol", status=2
    )
    assert f"did you mean '{OFT}'?" in output("openvla-7b-oft-finetuned-libero-spatial", status=2)
