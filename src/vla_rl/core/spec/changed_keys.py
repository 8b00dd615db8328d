"""Keys that specs had before version 0.1, and what to write now. Only the message about an unknown key reads this
table. It is deleted at 0.2, when no one has such a spec any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping

CHANGED: Mapping[str, tuple[str, str]] = {
    "delta_actions": ("actions", "actions: {relative_to: state, dimensions: [0, 1, ...]}"),
    "kl_coef": ("kl", "kl: {coef: ...}"),
    "kl_estimator": ("kl", "kl: {coef: ..., estimator: ...}"),
    "proximal": ("correction", "correction: {type: decoupled, proximal: ...}"),
    "behaviour_weight_threshold": ("correction", "correction: {type: decoupled, threshold: ...}"),
    "truncation": ("correction", "correction: {type: truncated, threshold: ...}"),
    "rho_bar": ("correction", "correction: {type: v-trace, rho_bar: ...}"),
    "c_bar": ("correction", "correction: {type: v-trace, c_bar: ...}"),
    "advantage_std": ("normalize_advantages", "normalize_advantages: unbiased, population or null"),
    "std_of": ("normalize_by_std", "normalize_by_std: group, step or null"),
    "initial_temperature": ("temperature", "temperature: {learned: {initial: ...}}"),
    "target_entropy": ("temperature", "temperature: {learned: {target_entropy: ...}}"),
    "temperature_lr": ("temperature", "temperature: {learned: {lr: ...}}"),
    "corrections": ("demonstrations", "demonstrations: {share: ..., corrections: true}"),
    "demonstration_cloning": ("demonstrations", "demonstrations: {share: ..., cloning: ...}"),
    "expectile": ("algorithm", "algorithm: {type: iql, expectile: ...}"),
    "target_rate": ("algorithm", "algorithm: {type: iql, target_rate: ...}"),
    "bins": ("head", "head: {type: bins, count: ...}"),
    "port": ("ask", "ask: {type: page, port: ...}"),
    "address_file": ("ask", "ask: {type: page, address_file: ...}"),
    "terminal": ("ask", "ask: {type: terminal, device: ...}"),
    "benchmark": ("tasks", "tasks: MT10, or names of tasks"),
    "weights": ("max_lag", "max_lag: {pinned: ...}"),
    "steps": ("auto_reset", "auto_reset: {steps: ...}"),
    "sampling": ("capacity", "a capacity alone: with one, groups are drawn from the buffer"),
    "max_over_estimation": ("quality_thresholds", "quality_thresholds: {max_over_estimation: ...}"),
    "cluster_min_samples": ("cluster_eps", "always 2"),
    "steepness": ("reward_scale", "always 10"),
    "midpoint": ("reward_scale", "always 0.5"),
    "encoder_batch": ("encoder", "always 8"),
    "min_height": ("fps", "always 224"),
    "recent": ("per_real", "always the newest 512 episodes"),
}
"""Former key -> (a key of the same section today, what to write)."""


def describe_change(key: object, known_keys: Collection[str]) -> str:
    """Return what to write for a key that a section with these keys had once; "" if it never had it."""
    present, text = CHANGED.get(str(key), ("", ""))
    return f"; now {text}" if present in known_keys else ""
