"""Self-referential policy optimisation as siiRL implements it: progress rewards (the distance of a failed trajectory to
the batch's own successes, in embedding space), then GRPO. A trajectory is embedded by V-JEPA 2 over the frames of its
episode, averaged over its tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.errors import UserError, first_line
from vla_rl.core.paths import expand_tilde
from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import Advantages, Array, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.srpo.config import EncoderSettings, RewardSettings, SRPOConfig
from vla_rl.toolkit.algorithms.policy_gradient import (
    PolicyGradientAlgorithm,
    compute_clipped_surrogate,
    group_relative_advantages,
    loss_terms,
    policy_loss,
    select_groups,
)
from vla_rl.toolkit.models.checkpoints.files import resolve_checkpoint

if TYPE_CHECKING:
    from transformers import VJEPA2Model

CLUSTER_MIN_SAMPLES = 2
"""DBSCAN's min_samples, as in siiRL: two successes near each other make a cluster, a single one does not."""
STEEPNESS, MIDPOINT = 10.0, 0.5
"""Sigmoid of a failure's relative distance d in [0, 1], as in siiRL's published recipe: the nearest failure gets 0.99
of `reward_scale`, the farthest 0.01, one halfway a half."""
FLAT = 1e-6
"""Range of a task's distances below which they count as equal: every failure gets relative distance 0.5."""


@attrs.frozen(kw_only=True, eq=False)
class TrajectoryProgress:
    """Progress of the N trajectories of a batch, float64 [N] each; NaN where it is not defined."""

    rewards: Array
    """Reward: 1 for a success, `reward_scale * sigmoid(...)` for a failure, 0 for one whose task has no success."""
    distances: Array
    """Euclidean distance of a failure to the nearest centre of its task's successes, in the encoder's units."""
    normalized: Array
    """Distance scaled to [0, 1] among the failures of the same task."""


class SRPO(PolicyGradientAlgorithm):
    """GRPO on shaped rewards. The first call of `features` loads the encoder, so only in the process that embeds."""

    config: SRPOConfig

    def __init__(self, config: SRPOConfig, context: AlgorithmContext) -> None:
        super().__init__(config)
        self.device = config.device or context.device
        self.camera = config.camera
        self.encoder: TrajectoryEncoder | None = None

    def features(self, frames: tuple[Frames, ...]) -> Tensor:
        if self.encoder is None:
            self.encoder = TrajectoryEncoder(self.config, self.device)
        return self.encoder(frames)

    def shape_rewards(self, rollout: Rollout) -> Rollout:
        """Replace the rewards of every trajectory in a group that passes the success filter by one progress reward, at
        its last action. A trajectory without frames (an embedding of zeros) keeps the simulator's rewards."""
        if rollout.features is None:
            return rollout
        embeddings = rollout.features.numpy()
        selected = select_groups(rollout, attrs.evolve(self.config, filter_identical=False)).numpy()
        counted = selected & embeddings.any(1)
        tasks = rollout.tasks or ("the only one",) * len(embeddings)
        progress = progress_rewards(embeddings, rollout.success.numpy(), tasks, counted, self.config)
        rewarded = reward_at_last_action(rollout, torch.from_numpy(np.nan_to_num(progress.rewards)).float())
        return rollout.evolve(
            rewards=torch.where(torch.from_numpy(counted)[:, None], rewarded, rollout.rewards),
            findings={
                "reward": torch.from_numpy(progress.rewards),
                "distance": torch.from_numpy(progress.distances),
                "normalized_distance": torch.from_numpy(progress.normalized),
            },
        )

    def select(self, rollout: Rollout) -> Tensor:
        """Return the trajectories to train on: groups are dropped by success rate, equal scores, truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return one advantage per trajectory, its shaped score relative to its group's, at every chunk step with a
        valid action."""
        advantages = group_relative_advantages(rollout, self.config)
        return attrs.evolve(advantages, metrics={**advantages.metrics, **shaping_metrics(rollout)})

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the clipped surrogate around the proximal policy, less the entropy bonus, plus the KL term."""
        terms = loss_terms(scores, batch, self.config)
        return policy_loss(terms, compute_clipped_surrogate(terms, self.config), batch, self.config)


def success_centres(successes: Array, settings: RewardSettings) -> Array:
    """Return the centres [K, D] of the successes' embeddings float32 [S, D]: means of DBSCAN's clusters, which are
    found after scaling each dimension to unit variance, in raw units; the plain mean when there is no cluster."""
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    scaled = scaler.fit_transform(successes)
    labels = DBSCAN(eps=settings.cluster_eps, min_samples=CLUSTER_MIN_SAMPLES).fit(scaled).labels_
    clusters = [scaled[labels == label].mean(0) for label in np.unique(labels[labels >= 0])]
    return np.asarray(scaler.inverse_transform(np.stack(clusters)) if clusters else successes.mean(0, keepdims=True))


def progress_rewards(
    embeddings: Array, success: Array, tasks: Sequence[str], counted: Array, settings: RewardSettings
) -> TrajectoryProgress:
    """Return the rewards of the trajectories of one batch, compared within their task (siiRL's SRPO).

    Args:
        embeddings: float32 [N, D].   success: bool [N].   tasks: N task names.
        counted: bool [N]: trajectories that take part; the others neither serve as targets nor get a reward.
    """
    rewards, distances, normalized = (np.full(len(success), np.nan) for _ in range(3))
    rewards[counted] = success[counted]
    names = np.asarray(tasks)
    for task in dict.fromkeys(tasks):
        members = counted & (names == task)
        good, bad = members & success, members & ~success
        if not good.any() or not bad.any():
            continue
        centres = success_centres(embeddings[good], settings).astype(np.float64)
        gaps = embeddings[bad].astype(np.float64)[:, None] - centres
        nearest = np.linalg.norm(gaps, axis=-1).min(1)
        low, high = nearest.min(), nearest.max()
        within = np.full(len(nearest), 0.5) if high - low < FLAT else (nearest - low) / (high - low)
        distances[bad], normalized[bad] = nearest, within
        rewards[bad] = settings.reward_scale / (1 + np.exp(-STEEPNESS * (MIDPOINT - within)))
    return TrajectoryProgress(rewards=rewards, distances=distances, normalized=normalized)


def reward_at_last_action(rollout: Rollout, rewards: Tensor) -> Tensor:
    """Return rewards float32 [T, N, C]: those given, [N], at the last valid action of each trajectory, 0 elsewhere."""
    valid = by_action(rollout.valid)
    left = valid.long().flip(0).cumsum(0).flip(0)  # number of valid actions from here on
    return by_chunk(torch.where(valid & (left == 1), rewards, torch.zeros(())), rollout.valid.shape[-1])


def shaping_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics: the share of trajectories with a shaped reward, and the means of their distances and rewards."""
    if not rollout.findings:
        return {"srpo/shaped": 0.0}
    shaped = ~rollout.findings["distance"].isnan()
    metrics = {"srpo/shaped": float(shaped.double().mean())}
    if shaped.any():
        metrics["srpo/distance"] = float(rollout.findings["distance"][shaped].mean())
        metrics["srpo/reward"] = float(rollout.findings["reward"][shaped].mean())
    return metrics


TINY = "tiny"
TABLETOP = "builtin:tabletop"
BUILTIN = Path(__file__).parent / "checkpoints"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
EXAMPLE = "facebook/vjepa2-vitg-fpc64-384"
BATCH = 8
"""Trajectories per forward pass: 512 frames at once with `frames: 64`. The embeddings do not depend on it, and fewer
frames or a smaller `image_size` save more memory."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")

Frames = np.ndarray[Any, Any]


class EncoderError(UserError):
    """Raised when the video encoder cannot be used; the message says what is missing and what to do."""


def frame_indices(count: int, num_frames: int) -> Frames:
    """Return the indices, int64 [num_frames], of the frames to embed out of `count` >= 1: evenly spaced from first to
    last, rounded down. A shorter trajectory is repeated from its start."""
    if count < num_frames:
        return np.resize(np.arange(count), num_frames)
    return np.linspace(0, count - 1, num_frames).astype(np.int64)


def preprocess_frames(frames: Frames, size: int, device: str | torch.device) -> Tensor:
    """Return frames uint8 [F, H, W, 3] as float32 [F, 3, size, size]: short side resized to int(256 / 224 * size)
    (bilinear with anti-aliasing, rounded to 8 bit), centre crop, ImageNet normalisation."""
    clip = torch.from_numpy(np.ascontiguousarray(frames)).to(device).permute(0, 3, 1, 2).float()
    height, width = clip.shape[2:]
    short = int(256.0 / 224 * size)
    if height <= width:
        shape = (short, int(short * width / height))
    else:
        shape = (int(short * height / width), short)
    clip = functional.interpolate(clip, shape, mode="bilinear", antialias=True).round()
    top, left = round((shape[0] - size) / 2), round((shape[1] - size) / 2)
    clip = clip[:, :, top : top + size, left : left + size] / 255
    mean, std = (torch.tensor(numbers, device=device).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return (clip - mean) / std


def check_encoder(settings: EncoderSettings) -> None:
    """Raise EncoderError unless `encoder` is "tiny", a folder with a V-JEPA 2 checkpoint, or a hub name whose
    configuration is in the cache or can be fetched into it; CheckpointError for an unknown `builtin:NAME`."""
    name = settings.encoder
    if name == TINY:
        return
    from transformers import AutoConfig, VJEPA2Config

    folder = _find_folder(name)
    if not folder.is_dir() and (folder.exists() or not HUB_NAME.fullmatch(name)):
        raise _missing_encoder_error(
            f"{name!r} is neither a folder (looked at {folder.absolute()}) nor OWNER/NAME of the hub"
        )
    try:
        config = AutoConfig.from_pretrained(folder if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        where = f"folder {folder.absolute()}" if folder.is_dir() else f"{name} of the hub, or the hub's cache,"
        raise _missing_encoder_error(f"{where} gave no V-JEPA 2 checkpoint: {first_line(error)}") from error
    if not isinstance(config, VJEPA2Config):
        raise _missing_encoder_error(f"{name} is a {config.model_type!r} model, and no V-JEPA 2")


def _find_folder(name: str) -> Path:
    return resolve_checkpoint(name, (), BUILTIN) if name.startswith("builtin:") else expand_tilde(name)


def _missing_encoder_error(problem: str) -> EncoderError:
    return EncoderError(
        f"algorithm.encoder: {problem}\n"
        f"  with network access: hf download {EXAMPLE} --local-dir FOLDER (config.json and *.safetensors), then set "
        f"algorithm.encoder: FOLDER; or encoder: {TINY} (small, random) to try the path out, {TABLETOP} on the tabletop"
    )


def load_model(name: str, device: str | torch.device) -> VJEPA2Model:
    """Return the encoder in inference mode; "tiny" is a small random one, always the same. Raise EncoderError for
    weights that are missing, truncated, or of another shape."""
    from transformers import VJEPA2Config, VJEPA2Model
    from transformers.utils.logging import disable_progress_bar

    if name == TINY:
        config = VJEPA2Config(
            crop_size=64,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            pred_hidden_size=24,
            pred_num_hidden_layers=1,
            pred_num_attention_heads=1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = VJEPA2Model(config)
    else:
        folder = _find_folder(name)
        if not sys.stderr.isatty():
            disable_progress_bar()  # one line of a log, hundreds of columns long
        try:
            loaded: Any = VJEPA2Model.from_pretrained(
                folder if folder.is_dir() else name, dtype=torch.float32, output_loading_info=True
            )
            model, report = loaded
        except Exception as error:  # raised by transformers, safetensors or the hub
            raise EncoderError(f"algorithm.encoder: the weights of {name} cannot be read: {error}") from error
        missing = sorted(key for key in report["missing_keys"] if key.startswith("encoder."))
        if missing:
            raise EncoderError(
                f"algorithm.encoder: {name} lacks {len(missing)} tensors of the encoder, such as {missing[0]}; "
                f"fetch the checkpoint again"
            )
    del model.predictor  # predicts masked parts of a video in pretraining; unused here
    result: VJEPA2Model = model.to(device).eval().requires_grad_(False)
    return result


class TrajectoryEncoder:
    """Embeds trajectories, a batch at a time."""

    def __init__(self, settings: EncoderSettings, device: str | torch.device) -> None:
        check_encoder(settings)
        self.model = load_model(settings.encoder, device)
        config: Any = self.model.config
        self.frames = settings.frames
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.device = torch.device(device)
        self.size: int = settings.image_size or config.crop_size
        self.width: int = config.hidden_size
        units = {"frames": (self.frames, config.tubelet_size), "image_size": (self.size, config.patch_size)}
        for what, (value, unit) in units.items():
            if value % unit:
                raise EncoderError(f"algorithm.{what} is {value}; encoder {settings.encoder} takes multiples of {unit}")

    def __call__(self, trajectories: Sequence[Frames]) -> Tensor:
        """Return embeddings float32 [N, D] on the CPU of N trajectories uint8 [frames, H, W, 3]; zeros where empty."""
        out = torch.zeros(len(trajectories), self.width)
        framed = [i for i, frames in enumerate(trajectories) if len(frames)]
        for start in range(0, len(framed), BATCH):
            chosen = framed[start : start + BATCH]
            out[chosen] = self._embed_trajectories([trajectories[i] for i in chosen])
        return out

    @torch.inference_mode()
    def _embed_trajectories(self, trajectories: Sequence[Frames]) -> Tensor:
        clips = [preprocess_frames(f[frame_indices(len(f), self.frames)], self.size, self.device) for f in trajectories]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            tokens = self.model.get_vision_features(torch.stack(clips))
        return tokens.float().mean(1).cpu()
