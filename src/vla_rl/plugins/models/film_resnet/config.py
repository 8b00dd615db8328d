"""What a spec says about the model; light to import."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import deep_iterable, ge, in_, le, min_len

DTYPES = ("float32", "bfloat16")
GREEDY = ("mode", "median")
GROUP = 8
"""Channels that are normalised together."""


def _in_groups(config: NetworkConfig, attribute: Attribute[Any], value: tuple[int, ...]) -> None:
    odd = [width for width in value if width < GROUP or width % GROUP]
    if odd:
        raise ValueError(f"channels are normalised in groups of {GROUP}; {odd[0]} is no multiple of it")


@frozen(kw_only=True)
class NetworkConfig:
    """Sizes of the network. A checkpoint has its own."""

    image_size: int = field(default=64, validator=[ge(32), le(256)])
    """Height and width in pixels that the network sees; frames of other sizes are scaled to it."""
    channels: tuple[int, ...] = field(default=(32, 64), validator=[min_len(1), _in_groups])
    """Channels of each stage. The first one sees a quarter of the pixels a side, each further one half of that."""
    blocks: int = field(default=1, validator=ge(1))
    """Residual blocks of a stage, two convolutions each."""
    keypoints: int = field(default=32, validator=ge(1))
    """Places in the picture of each camera that the network finds (spatial softmax)."""
    state_waves: int = field(default=4, validator=[ge(0), le(12)])
    """Sines and cosines, of periods 2, 1, 1/2, ..., by which each number of the state is seen besides itself: a
    position in metres is told apart by centimetres."""
    words: int = field(default=1024, validator=ge(2))
    """Rows of the table in which words and pairs of words are looked up by their hash."""
    instruction: int = field(default=32, validator=ge(1))
    """Numbers that stand for an instruction."""
    hidden: tuple[int, ...] = field(default=(256, 256), validator=[min_len(1), deep_iterable(ge(1))])
    """Widths of the layers behind cameras, state and instruction."""
    bins: int = field(default=33, validator=[ge(2), le(1024)])
    """Values that each number of an action can take, evenly from the lowest to the highest; an odd number has the
    middle among them."""


@frozen(kw_only=True)
class FilmValueHeadConfig:
    """The critic, built when the algorithm needs one: an MLP on what cameras, state and instruction give."""

    hidden: tuple[int, ...] = field(default=(256, 128), validator=deep_iterable(ge(1)))
    """Widths of its hidden layers (ReLU between)."""
    detach: bool = True
    """Keep the critic's gradient out of the policy."""


@frozen(kw_only=True)
class FilmResnetConfig:
    """Keys of `model:` in a spec with `type: film_resnet`."""

    checkpoint: str | None = None
    """Folder that the model was saved in, or `builtin:NAME` of those that ship with the package. None: random weights,
    for the simulator's cameras, state and actions."""
    network: NetworkConfig | None = None
    """Sizes. None: those of the checkpoint, or the defaults; given beside a checkpoint they must be the same."""
    cameras: tuple[str, ...] | None = None
    """Cameras in the order in which the model sees them. None: those of the checkpoint's training, else all."""
    use_state: bool | None = None
    """See the proprioceptive state. None: as the checkpoint was trained, else where there is one."""
    shift: int = field(default=2, validator=[ge(0), le(32)])
    """Imitation moves each picture by up to so many pixels each way, at random, with its edge repeated (DrQ)."""
    smoothing: float = field(default=0.7, validator=[ge(0.0), le(8.0)])
    """Imitation aims at a Gaussian of this deviation, in bins, around the demonstrated number; 0: at its bin alone."""
    greedy: str = field(default="mode", validator=in_(GREEDY))
    """What a greedy policy does with the probabilities of the bins: the likeliest, or the median. On LIBERO
    the median did better after reinforcement learning, and the mode for a clone."""
    value_head: FilmValueHeadConfig = field(factory=FilmValueHeadConfig)
    """The critic, when the algorithm asks for one."""
    dtype: str = field(default="float32", validator=in_(DTYPES))
    """Of the weights. Log-probs, entropies and values are computed in float32 either way."""
