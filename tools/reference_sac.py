"""Write the numbers of public SAC and RLPD implementations on small random inputs, for tests/reference/algorithms.

    python -m pip install stable-baselines3                      # numbers of 2.9.2
    python tools/reference_sac.py sb3 tests/reference/algorithms/sb3_sac.json

    git clone https://github.com/ikostrikov/rlpd                 # numbers of c90fd4b
    python -m pip install jax==0.4.30 flax==0.8.5 optax==0.2.3 tensorflow-probability==0.24.0 gym 'scipy<1.14' 'numpy<2'
    PYTHONPATH=rlpd python tools/reference_sac.py rlpd tests/reference/algorithms/rlpd_sac.json

Both run their own learners for a few updates, in a separate interpreter: vla-rl is not imported. A case holds the
networks before the first update, and for each update the batch, the normal numbers and the target networks that were
drawn, and the losses; then the networks after the last one. A linear layer is [weights [outputs, inputs], bias].
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

STATE = 5
ACTION = 4
HIDDEN = (6, 6)
BATCH = 4
UPDATES = 3
DISCOUNT = 0.9
RATE = 0.05
"""Share of the distance that target networks move."""
LR = {"actor": 1e-3, "critic": 3e-3, "temperature": 2e-3}


def batches() -> list[dict[str, Any]]:
    """Return random transitions for each update; `continues` is 0 where an episode ended."""
    draws = np.random.default_rng(0)
    return [
        {
            "obs": draws.standard_normal((BATCH, STATE)),
            "next_obs": draws.standard_normal((BATCH, STATE)),
            "actions": draws.uniform(-0.9, 0.9, (BATCH, ACTION)),
            "rewards": draws.standard_normal(BATCH),
            "continues": (np.arange(BATCH) != number).astype(np.float64),
        }
        for number in range(UPDATES)
    ]


def numbers(value: Any) -> Any:
    """Return arrays and tensors, in lists and dicts, as lists of float32 numbers."""
    if isinstance(value, dict):
        return {name: numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(item) for item in value]
    if isinstance(value, (int, float, str)):
        return value
    array = np.asarray(value, np.float32)
    return np.array([float(f"{number:.9g}") for number in array.ravel()]).reshape(array.shape).tolist()


# ------------------------------------------------------------------------------------------- stable-baselines3


def sb3_case(*, learned: bool) -> dict[str, Any]:
    """Run SAC of stable-baselines3, with a temperature that is learned or fixed."""
    gymnasium: Any = import_module("gymnasium")
    torch: Any = import_module("torch")
    normal: Any = import_module("torch.distributions.normal")
    sb3: Any = import_module("stable_baselines3")
    buffers: Any = import_module("stable_baselines3.common.type_aliases")
    logger: Any = import_module("stable_baselines3.common.logger")

    class Space(gymnasium.Env):  # type: ignore[misc]
        """Spaces alone; nothing is stepped."""

        observation_space = gymnasium.spaces.Box(-10, 10, (STATE,))
        action_space = gymnasium.spaces.Box(-1, 1, (ACTION,))

    agent = sb3.SAC(
        "MlpPolicy",
        Space(),
        gamma=DISCOUNT,
        tau=RATE,
        learning_rate=LR["critic"],
        ent_coef="auto_0.5" if learned else 0.3,
        policy_kwargs={"net_arch": list(HIDDEN)},
        seed=1,
        device="cpu",
    )
    agent.set_logger(logger.Logger(None, []))
    drawn: list[Any] = []
    standard_normal = normal._standard_normal  # noqa: SLF001 - the one place where a Normal draws

    def recorded(*args: Any, **kwargs: Any) -> Any:
        drawn.append(standard_normal(*args, **kwargs))
        return drawn[-1]

    def linears(*modules: Any) -> list[Any]:
        found = [layer for module in modules for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        return [[layer.weight.detach().clone(), layer.bias.detach().clone()] for layer in found]

    def networks() -> dict[str, Any]:
        actor = agent.actor
        log_temperature = agent.log_ent_coef if learned else torch.log(agent.ent_coef_tensor)
        return {
            "critics": [linears(network) for network in agent.critic.q_networks],
            "targets": [linears(network) for network in agent.critic_target.q_networks],
            "actor": linears(actor.latent_pi),
            "mean": linears(actor.mu)[0],
            "log_std": linears(actor.log_std)[0],
            "temperature": float(log_temperature.detach().exp()),
        }

    case: dict[str, Any] = {"before": networks(), "updates": [], "target_entropy": -ACTION, "learned": learned}
    for batch in batches():
        tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in batch.items()}
        samples = buffers.ReplayBufferSamples(
            tensors["obs"],
            tensors["actions"],
            tensors["next_obs"],
            1 - tensors["continues"][:, None],
            tensors["rewards"][:, None],
        )
        agent.replay_buffer.sample = lambda *args, samples=samples, **kwargs: samples
        drawn.clear()
        normal._standard_normal = recorded  # noqa: SLF001
        agent.train(1, BATCH)
        normal._standard_normal = standard_normal  # noqa: SLF001
        values = agent.logger.name_to_value
        case["updates"].append(
            {
                "batch": batch,
                "normals": drawn[0],
                "next_normals": drawn[1],
                "chosen": [0, 1],
                "critic_loss": float(values["train/critic_loss"]),
                "actor_loss": float(values["train/actor_loss"]),
            }
        )
        agent.logger.name_to_value.clear()
    return case | {"after": networks()}


def sb3() -> dict[str, Any]:
    meta = {
        "repository": "DLR-RM/stable-baselines3",
        "version": version("stable-baselines3"),
        "function": "SAC.train",
        "origin": "executed",
        "notes": "all learning rates are critic's; the gradient of the temperature's loss is 1 / temperature of the "
        "paper's, which Adam's first step does not see",
    }
    return {"meta": meta, "cases": {"learned temperature": sb3_case(learned=True), "fixed": sb3_case(learned=False)}}


# --------------------------------------------------------------------------------------------------------- RLPD


def rlpd_case(critics: int, drawn: int, *, layer_norm: bool, backup: bool) -> dict[str, Any]:
    """Run RLPD's learner with `critics` Q-networks, of which `drawn` count in a target."""
    jax: Any = import_module("jax")
    import_module("tensorflow_probability.substrates.jax")  # the agents look it up as an attribute
    agents: Any = import_module("rlpd.agents")
    gym: Any = import_module("gym")
    box = gym.spaces.Box
    agent = agents.SACLearner.create(
        7,
        box(-10, 10, (STATE,)),
        box(-1, 1, (ACTION,)),
        actor_lr=LR["actor"],
        critic_lr=LR["critic"],
        temp_lr=LR["temperature"],
        hidden_dims=HIDDEN,
        discount=DISCOUNT,
        tau=RATE,
        num_qs=critics,
        num_min_qs=drawn,
        critic_layer_norm=layer_norm,
        init_temperature=0.5,
        backup_entropy=backup,
    )

    def linear(layer: Any) -> list[Any]:
        return [np.asarray(layer["kernel"]).T, layer["bias"]]

    def network(params: Any) -> list[Any]:
        """Return the layers of one Q-network; hidden ones with the scale and bias of their LayerNorm."""
        (name,) = (name for name in params if name.startswith("MLP"))
        hidden = []
        for i in range(len(HIDDEN)):
            norm = params[name].get(f"LayerNorm_{i}")
            hidden.append(linear(params[name][f"Dense_{i}"]) + ([] if norm is None else [norm["scale"], norm["bias"]]))
        return [*hidden, linear(params["Dense_0"])]

    def ensemble(params: Any) -> list[Any]:
        (stacked,) = params.values()
        return [network(jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], stacked)) for i in range(critics)]

    def networks() -> dict[str, Any]:
        actor = agent.actor.params
        return {
            "critics": ensemble(agent.critic.params),
            "targets": ensemble(agent.target_critic.params),
            "actor": [linear(actor["MLP_0"][f"Dense_{i}"]) for i in range(len(HIDDEN))],
            "mean": linear(actor["OutputDenseMean"]),
            "log_std": linear(actor["OutputDenseLogStd"]),
            "temperature": float(np.exp(agent.temp.params["log_temp"])),
        }

    def normals(key: Any, obs: Any) -> Any:
        """Return the standard normal numbers of the policy's sample with a key."""
        policy = agent.actor.apply_fn({"params": agent.actor.params}, obs)
        actions = np.asarray(policy.sample(seed=key), np.float64)
        gaussian = policy.distribution
        return (np.arctanh(actions) - np.asarray(gaussian.mean())) / np.asarray(gaussian.stddev())

    case: dict[str, Any] = {
        "before": networks(),
        "updates": [],
        "target_entropy": float(agent.target_entropy),
        "learned": True,
        "entropy_backup": backup,
    }
    for batch in batches():
        arrays = {name: np.asarray(value, np.float32) for name, value in batch.items()}
        data = {
            "observations": arrays["obs"],
            "next_observations": arrays["next_obs"],
            "actions": arrays["actions"],
            "rewards": arrays["rewards"],
            "masks": arrays["continues"],
        }
        action_key, rest = jax.random.split(agent.rng)
        subset_key, rest = jax.random.split(rest)
        chosen = jax.random.choice(subset_key, a=np.arange(critics), shape=(drawn,), replace=False)
        next_normals = normals(action_key, data["next_observations"])
        for _ in range(2):  # dropout of target and of Q-networks
            _, rest = jax.random.split(rest)
        policy_key, _ = jax.random.split(rest)
        own_normals = normals(policy_key, data["observations"])
        agent, info = agent.update(data, 1)
        case["updates"].append(
            {
                "batch": batch,
                "normals": own_normals,
                "next_normals": next_normals,
                "chosen": np.asarray(chosen).tolist(),
                "critic_loss": float(info["critic_loss"]),
                "actor_loss": float(info["actor_loss"]),
                "temperature_loss": float(info["temperature_loss"]),
                "entropy": float(info["entropy"]),
            }
        )
    return case | {"after": networks()}


def rlpd() -> dict[str, Any]:
    package: Any = import_module("rlpd")
    folder = next(iter(package.__path__))
    git = ["git", "-C", folder, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    meta = {
        "repository": "ikostrikov/rlpd",
        "commit": commit or "c90fd4baf28c9c9ef40a81460a2e395092844f88",
        "function": "SACLearner.update",
        "origin": "executed",
        "versions": {name: version(name) for name in ("jax", "flax", "optax", "tensorflow-probability")},
        "notes": "critic_loss is the mean over Q-networks of squared errors; LayerNorm has an epsilon of 1e-6; the "
        "target entropy is minus half of the action's dimensions",
    }
    cases = {
        "ten critics, two drawn, LayerNorm": rlpd_case(10, 2, layer_norm=True, backup=True),
        "five critics, one drawn": rlpd_case(5, 1, layer_norm=False, backup=True),
        "entropy left out of targets": rlpd_case(3, 2, layer_norm=True, backup=False),
    }
    return {"meta": meta, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("implementation", choices=("sb3", "rlpd"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    result = {"sb3": sb3, "rlpd": rlpd}[options.implementation]()
    constants = {"discount": DISCOUNT, "target_rate": RATE, "lr": LR, "hidden": HIDDEN}
    options.file.write_text(json.dumps(numbers(result | {"constants": constants})) + "\n")
    print(f"{options.file}: {options.file.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
