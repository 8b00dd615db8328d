"""Spec keys of `film_resnet`; light to import."""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, ge, in_, le, min_len

from vla_rl.core.conventions import CAMERA_EVIDENCE, convention, order_cameras

DTYPES = ("float32", "bfloat16")
GREEDY = ("mode", "median")
GROUP = 8
"""Channels per group of GroupNorm."""


def _in_groups(config: NetworkConfig, attribute: Attribute[Any], value: tuple[int, ...]) -> None:
    misfits = [width for width in value if width < GROUP or width % GROUP]
    if misfits:
        raise ValueError(f"channels are normalised in groups of {GROUP}; {misfits[0]} is not a multiple of it")


@frozen(kw_only=True)
class Bins:
    """A distribution over bins, evenly spaced from the lowest to the highest value."""

    type: Literal["bins"] = "bins"
    count: int = field(default=33, validator=[ge(2), le(1024)])
    """Bins per action dimension, 2 to 1024; an odd number includes the middle."""


@frozen(kw_only=True)
class Gaussian:
    """A normal distribution squashed by tanh into the range of the actions."""

    type: Literal["gaussian"] = "gaussian"


@frozen(kw_only=True)
class NetworkConfig:
    """Sizes of the network. A checkpoint stores its own."""

    image_size: int = field(default=64, validator=[ge(32), le(256)])
    """Height and width in pixels of the network's input, 32 to 256; frames of other sizes are resized."""
    channels: tuple[int, ...] = field(default=(32, 64), validator=[min_len(1), _in_groups])
    """Channels of each stage, multiples of 8. The first stage has a quarter of the input's side, each further one half
    of the previous side."""
    blocks: int = field(default=1, validator=ge(1))
    """Residual blocks per stage, 1 or more, of two convolutions each."""
    keypoints: int = field(default=32, validator=ge(1))
    """Keypoints per camera (spatial softmax), 1 or more."""
    state_waves: int = field(default=4, validator=[ge(0), le(12)])
    """Number of sines and cosines, of periods 2, 1, 1/2, ..., that encode each number of the state in addition to the
    number itself, 0 to 12: so that a position in metres is resolved to centimetres."""
    words: int = field(default=1024, validator=ge(2))
    """Rows of the hashed embedding table of words and word pairs, 2 or more."""
    instruction: int = field(default=32, validator=ge(1))
    """Size of an instruction's embedding, 1 or more."""
    hidden: tuple[int, ...] = field(default=(256, 256), validator=[min_len(1), deep_iterable(and_(ge(1), le(16_384)))])
    """Widths of the fully connected layers after cameras, state and instruction, 1 to 16,384."""
    head: Bins | Gaussian = field(factory=Bins)
    """Distribution of each number of an action."""


@frozen(kw_only=True)
class FilmValueHeadConfig:
    """Keys of the critic, which is built when the algorithm needs one: an MLP on the features of cameras, state and
    instruction."""

    hidden: tuple[int, ...] = field(default=(256, 128), validator=deep_iterable(and_(ge(1), le(16_384))))
    """Widths of the hidden layers (ReLU between), 1 to 16,384."""
    detach: bool = True
    """Stop the critic's gradient from reaching the policy."""


@frozen(kw_only=True)
class FilmResnetConfig:
    """Keys of `model:` in a spec with `type: film_resnet`."""

    checkpoint: str | None = None
    """Folder in which the model was saved, or `builtin:NAME` for one that ships with the package. Null: random weights,
    for the simulator's cameras, state and actions."""
    network: NetworkConfig | None = field(default=None)
    """Sizes of the network. Null: the checkpoint's, or the defaults; if given with a checkpoint they must be equal to
    its own."""
    cameras: tuple[str, ...] | None = field(default=None, metadata=convention(order_cameras, evidence=CAMERA_EVIDENCE))
    """Cameras in the order in which the model sees them. Null: those of the checkpoint's training, else all."""
    use_state: bool | None = None
    """Feed the proprioceptive state. Null: as the checkpoint was trained, else if the simulator has one."""
    shift: int = field(default=2, validator=[ge(0), le(32)])
    """Image augmentation in behaviour cloning (DrQ): random shifts by up to this many pixels in each direction, 0 to
    32, edges repeated."""
    smoothing: float = field(default=0.7, validator=[ge(0.0), le(8.0)])
    """Label smoothing in behaviour cloning: standard deviation, in bins, of the Gaussian target around the demonstrated
    value, 0 to 8; 0: its bin alone."""
    greedy: str = field(default="mode", validator=in_(GREEDY))
    """Greedy decoding of the bins: `mode` takes the most likely bin, `median` the median. On LIBERO the median did
    better after RL, and the mode after behaviour cloning."""
    value_head: FilmValueHeadConfig = field(factory=FilmValueHeadConfig)
    """Critic, used when the algorithm asks for one."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Precision of the weights: float32 or bfloat16. Log-probs, entropies and values are always computed in float32."""

    @network.validator
    def _keys_of_bins(self, attribute: Attribute[Any], value: NetworkConfig | None) -> None:
        unused = () if value is None else self.without_effect(value)
        if unused:
            raise ValueError(f"`{unused[0]}` has no effect with a Gaussian head; leave it out")

    def without_effect(self, network: NetworkConfig) -> tuple[str, ...]:
        """Return the keys that are set and have no effect with this network."""
        if isinstance(network.head, Bins):
            return ()
        defaults = {"smoothing": 0.7, "greedy": "mode"}
        return tuple(key for key, default in defaults.items() if getattr(self, key) != default)
