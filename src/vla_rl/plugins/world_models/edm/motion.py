"""Motion model fitted by least squares instead of gradient descent: where the robot goes, where it appears in each
image, and how far each camera's image shifts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

CHANGED = 2 * 8 / 255
"""Difference of colours (range -1 to 1) above which a pixel has changed: 8 of 255 levels."""
RIDGE, TINY = 1e-4, 1e-12
"""Ridge added to the mean square of each input: a fraction of it, and a constant for an input that is always 0."""
IMAGE_SIDE = 64
"""Larger side, in pixels, to which larger images are scaled down."""
LAYERS = 3
"""Number of layers of `Motion.build_layers`."""
WHERE, NEAR = 4, 0.25
"""Maps per camera in `Motion.locate_robot`, and the distance from the robot (share of half a side) to saturation."""


class LeastSquares(nn.Module):
    """Linear regression y = W x + b over all pairs observed so far (ridge least squares); 0 before the first."""

    weight: Tensor
    moments: Tensor
    products: Tensor
    seen: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(inputs + 1, outputs))
        self.register_buffer("moments", torch.zeros(inputs + 1, inputs + 1))
        self.register_buffer("products", torch.zeros(inputs + 1, outputs))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[:-1] + self.weight[-1]

    def observe(self, x: Tensor, y: Tensor, counted: Tensor) -> None:
        """Add pairs x [B, inputs], y [B, outputs] where `counted` (bool [B]) is true, and solve again."""
        inputs = F.pad(x[counted], (0, 1), value=1.0)
        self.seen += len(inputs)
        share = len(inputs) / self.seen.clamp(min=1)
        self.moments.lerp_(inputs.T @ inputs / max(len(inputs), 1), share)
        self.products.lerp_(inputs.T @ y[counted] / max(len(inputs), 1), share)
        moments = self.moments.double()
        ridge = torch.diag(RIDGE * moments.diagonal() + TINY)
        self.weight.copy_(torch.linalg.solve(moments + ridge, self.products.double()))


@frozen(eq=False, kw_only=True)
class Path:
    """Predicted motion of the robot during a chunk, action by action."""

    steps: Tensor
    """Actions [B, C, A]."""
    start: Tensor
    poses: Tensor
    """Poses before the chunk [B, P], and after each action [B, C, P]."""
    places: tuple[Tensor, ...]
    """Position of the robot in each camera's image after each action, [B, C, 2] each."""
    origins: tuple[Tensor, ...]
    """Position of the robot in each camera's image before the chunk, [B, 2] each."""


class Motion(nn.Module):
    """Predicts poses and their effect on images. A pose is the state, or the sum of actions since the image."""

    usual: Tensor
    seen: Tensor

    def __init__(self, cameras: int, actions: int, state: int, size: tuple[int, int]) -> None:
        """Create an unfitted motion model.

        Args:
            actions: numbers per action.   state: numbers per state.   size: height and width of the images.
        """
        super().__init__()
        self.actions = actions
        pose = state or actions
        self.moved = LeastSquares(actions, state) if state else None
        self.places: Any = nn.ModuleList([LeastSquares(pose, 2) for _ in range(cameras)])
        """Regression from poses to the position of the robot in each camera's image, coordinates in [-1, 1]. The
        position is the centre of the changed pixels, half of which show where the robot was and half where it is.
        Linear: exact for a camera that looks down on a table, and close enough for many others."""
        self.shifts: Any = nn.ModuleList([LeastSquares(pose, 2) for _ in range(cameras)])
        """Regression from changes of the pose to the shift of each camera's image; 0 for cameras that stand still."""
        self.register_buffer("usual", torch.zeros(3 * cameras, *size))
        """Mean of all images; `build_layers` does not use it before the first was observed."""
        self.register_buffer("seen", torch.zeros(()))

    def predict_path(self, chunk: Tensor, state: Tensor) -> Path:
        """Return the predicted path of chunks [B, C A] from states [B, S]."""
        steps = chunk.unflatten(1, (-1, self.actions))
        if self.moved is None:
            start, poses = torch.zeros_like(steps[:, 0]), steps.cumsum(1)
        else:
            start, poses = state, state[:, None] + self.moved(steps).cumsum(1)
        places, origins = (tuple(place(pose) for place in self.places) for pose in (poses, start))
        return Path(steps=steps, start=start, poses=poses, places=places, origins=origins)

    def build_layers(self, images: Tensor, path: Path) -> Tensor:
        """Return the layers [B, LAYERS, cameras 3, H, W] that the next images are composed of, from images [B,
        cameras 3, H, W]: the image shifted as its camera moves (the scene); shifted as the robot moves in it; and the
        mean of all images, which also fills what the shifts bring into view."""
        displacement = path.poses[:, -1] - path.start
        scene = [shift(displacement) for shift in self.shifts]
        robot = [places[:, -1] - origin for places, origin in zip(path.places, path.origins, strict=True)]
        usual = torch.where(self.seen > 0, self.usual, images)
        return torch.stack((*(_shift_images(images, by, usual) for by in (scene, robot)), usual), dim=1)

    def locate_robot(self, path: Path, like: Tensor) -> Tensor:
        """Return maps [B, cameras WHERE, h, w], as large as `like` [.., h, w]: how far to the right of and below each
        cell the robot is, before and after the chunk, in each camera's image."""
        cells, ends = _pixel_centres(like), zip(path.origins, path.places, strict=True)
        ways = [place[:, None] - cells for origin, places in ends for place in (origin, places[:, -1])]
        result: Tensor = (torch.cat(ways, dim=2) / NEAR).tanh().transpose(1, 2).unflatten(2, like.shape[-2:])
        return result

    def add_chunks(
        self, chunk: Tensor, state: Tensor, then: Tensor, num_executed: Tensor, pair: tuple[Tensor, Tensor]
    ) -> None:
        """Update the regressions.

        Args:
            chunk: [B, C A].   state, then: states before and after, [B, S].
            num_executed: int64 [B], actions executed of each chunk; may be 0.
            pair: images before and after, [B, cameras 3, H, W].
        """
        steps, real = chunk.unflatten(1, (-1, self.actions)), num_executed > 0
        if self.moved is not None:
            counted = torch.arange(steps.shape[1], device=chunk.device) < num_executed[:, None]
            mean = (steps * counted[:, :, None]).sum(1) / num_executed.clamp(min=1)[:, None]
            self.moved.observe(mean, (then - state) / num_executed.clamp(min=1)[:, None], real)
        self.seen += real.sum()
        self.usual.lerp_(pair[0][real].sum(0) / real.sum().clamp(min=1), real.sum() / self.seen.clamp(min=1))
        path = self.predict_path(chunk, state)
        end = path.poses[torch.arange(len(num_executed), device=chunk.device), num_executed.clamp(min=1) - 1]
        cameras = zip(*(at_most(images, IMAGE_SIDE).chunk(len(self.places), dim=1) for images in pair), strict=True)
        for (before, after), place, shift in zip(cameras, self.places, self.shifts, strict=True):
            changed = (after - before).abs() > CHANGED
            share = changed.float().mean(1).flatten(1)
            total = share.sum(1)
            middle = share @ _pixel_centres(before) / total.clamp(min=1e-6)[:, None]
            place.observe((path.start + end) / 2, middle, real & (total > 0))
            by, sure = _estimate_shift(before, after)
            shift.observe(end - path.start, by, real & sure)


def _shift_images(images: Tensor, by: Sequence[Tensor], beyond: Tensor) -> Tensor:
    """Return each camera's image shifted by its x and y [B, 2] (shares of half a side), in whole pixels so that
    nothing blurs. `beyond` [B, cameras 3, H, W] fills what comes into view."""
    moved = []
    cameras = (x.chunk(len(by), dim=-3) for x in (images, beyond))
    for image, new, shift in zip(*cameras, by, strict=True):
        sides = torch.tensor(image.shape[:1:-1], device=image.device)
        whole_pixels = (shift * sides / 2).round() * 2 / sides
        still = torch.eye(2, device=image.device).expand(len(whole_pixels), -1, -1)
        grid = F.affine_grid(
            torch.cat((still, -whole_pixels[:, :, None]), dim=2), list(image.shape), align_corners=False
        )
        sampled = F.grid_sample(F.pad(image, (0, 0, 0, 0, 0, 1), value=1.0), grid, "nearest", align_corners=False)
        moved.append(sampled[:, :3] + (1 - sampled[:, 3:]) * new)
    return torch.cat(moved, dim=1)


def at_most(x: Tensor, side: int) -> Tensor:
    """Return images [B, D, H, W], scaled down so that the larger side has at most `side` pixels."""
    larger = max(x.shape[2:])
    if larger <= side:
        return x
    return F.interpolate(x, [max(1, n * side // larger) for n in x.shape[2:]], mode="area")


def _pixel_centres(x: Tensor) -> Tensor:
    """Return x and y of the pixel centres of [.., H, W], in an image with coordinates from -1 to 1: [H W, 2]."""
    down, right = ((torch.arange(n, device=x.device) + 0.5) / n * 2 - 1 for n in x.shape[-2:])
    return torch.stack(torch.meshgrid(right, down, indexing="xy"), dim=-1).reshape(-1, 2)


def _estimate_shift(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shift (x, y) [B, 2], in shares of half a side, that best maps images `before` onto `after` ([B, 3,
    H, W]); and bool [B], whether it counts: the images differ, and the shift is 0 or explains at least half of the
    squared difference. What comes into view counts as unexplained. All shifts by up to a quarter of the image are
    tried at once, by FFT."""
    height, width = before.shape[2:]
    size = (height + height // 4, width + width // 4)  # padding against wrap-around

    squares = (x.square().sum(1) for x in (before, after))
    inputs = (before, after, torch.ones_like(before[:1, 0]), *squares)
    one, other, ones, *energies = (torch.fft.rfft2(x, s=size) for x in inputs)
    products = (one.conj() * other).sum(1)
    # The inverse of such a product has, at (y, x), the sum of products of the first with the second shifted by (y, x).
    errors = torch.fft.irfft2(energies[0].conj() * ones + ones.conj() * energies[1] - 2 * products, s=size)
    area = torch.fft.irfft2(ones.conj() * ones, s=size)
    ways = [torch.cat((torch.arange(n // 4 + 1), torch.arange(-(n // 4), 0))) for n in (height, width)]
    rows, columns = (way.to(before.device) for way in ways)
    errors, shared = (x[:, rows][:, :, columns].flatten(1) for x in (errors, area))
    still, at = errors[:, 0], (errors / shared).argmin(1)
    left = errors.gather(1, at[:, None])[:, 0] + still * (1 - shared[0, at] / (height * width))
    sure = (still > height * width * CHANGED**2) & ((at == 0) | (left < still / 2))
    y, x = rows[at // len(columns)], columns[at % len(columns)]
    return torch.stack((x * 2 / width, y * 2 / height), dim=1).to(before), sure
