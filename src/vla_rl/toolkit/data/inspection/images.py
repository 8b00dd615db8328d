"""Finds images of recorded episodes that are black, frozen, turned, or of another camera."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.toolkit.data.inspection.recorded import FEWEST, DataFinding, InspectedEpisode, RecordedData, group_findings
from vla_rl.toolkit.data.inspection.values import LONG

SIDE = 16
"""Side to which images are scaled before they are compared."""
WHOLE = 100
"""Most episodes of which `FRAMES` images are read; of more, only the one in the middle."""
FRAMES = (0.15, 0.5, 0.85)
"""Places in an episode of the images that are read, as a share of its length."""
DARK, PLAIN = 6.0, 2.0
"""Mean brightness and standard deviation, of 255, below which an image shows nothing."""
STILL, MOVING = 0.05, 0.5
"""Mean difference, of 255, between the images of an episode: below it they are one, above it they are not."""
REPEATS = 4
"""Images equal to the one before, one after the other while the arm moves, from which they are reported."""
FITS = 0.6
"""A turned image has to be this much nearer to the usual one than it is as recorded."""
TURNS: dict[str, Callable[[Array], Array]] = {
    "upside down (turned by 180 degrees)": lambda image: image[::-1, ::-1],
    "upside down (flipped)": lambda image: image[::-1],
    "mirrored": lambda image: image[:, ::-1],
    "in the order blue, green, red": lambda image: image[..., ::-1],
}


@frozen(kw_only=True, eq=False)
class CameraImages:
    """Small images of one camera."""

    camera: str
    images: dict[int, Array]
    """Number of an episode -> float32 [frames, SIDE, SIDE, 3]."""
    sizes: dict[int, tuple[int, int]]
    """Number of an episode -> height and width of its images."""

    def choose_episodes(self, data: RecordedData) -> CameraImages:
        """Return the images of these episodes."""
        numbers = {episode.number for episode in data.episodes}
        return CameraImages(
            camera=self.camera,
            images={number: images for number, images in self.images.items() if number in numbers},
            sizes={number: size for number, size in self.sizes.items() if number in numbers},
        )

    def usual_image(self) -> Array:
        """Return the median over the episodes of their middle images, [SIDE, SIDE, 3]."""
        return np.asarray(np.median([images[len(images) // 2] for images in self.images.values()], axis=0))


def find_image_faults(data: RecordedData, views: Sequence[CameraImages]) -> Iterator[DataFinding]:
    """Yield what is wrong with the images of these episodes. `views`: of them, and of others."""
    views = [one.choose_episodes(data) for one in views]
    for one in views:
        yield from _find_empty(data, one)
        yield from _find_other_sizes(one)
        if len(one.images) >= FEWEST:
            yield from _find_frozen(data, one)
            yield from _find_turned(one, [other for other in views if other is not one])


def read_views(data: RecordedData) -> tuple[list[CameraImages], list[DataFinding]]:
    """Read some images of each episode and camera. Return them, and what could not be read."""
    shares = FRAMES if len(data.episodes) <= WHOLE else FRAMES[1:2]
    all_views: list[CameraImages] = []
    findings: list[DataFinding] = []
    for camera in data.cameras:
        views = CameraImages(camera=camera, images={}, sizes={})
        texts: dict[int, tuple[str, float | None]] = {}
        for episode in data.episodes:
            try:
                frames = [data.read_image(episode, camera, int(place * (len(episode) - 1))) for place in shares]
            except UserError as exc:
                texts[episode.number] = str(exc).splitlines()[0], None
                continue
            views.sizes[episode.number] = frames[0].shape[:2]
            views.images[episode.number] = np.stack([shrink_image(frame) for frame in frames])
        all_views.append(views)
        findings += group_findings(camera, texts)
    return all_views, findings


def find_repeated_images(data: RecordedData) -> Iterator[DataFinding]:
    """Read every image. Yield episodes that repeat an image while the arm moves, for cameras that show most motion."""
    motion = data.state or data.action
    reach = data.measure_rest(motion)
    for camera in data.cameras:
        texts: dict[int, tuple[str, float | None]] = {}
        shares = []
        for episode in data.episodes:
            try:
                images = np.stack(
                    [shrink_image(data.read_image(episode, camera, frame)) for frame in range(len(episode))]
                )
            except UserError as exc:
                texts[episode.number] = str(exc).splitlines()[0], None
                continue
            changes = np.abs(np.diff(images, axis=0)).max(axis=(1, 2, 3)) >= MOVING
            shares.append(changes.mean())
            edges = np.flatnonzero([True, *changes, True])  # first frame of each image, and the end
            rows = episode.vectors[motion]
            for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                if end - first > REPEATS and (np.ptp(rows[first:end], axis=0) > reach).any():
                    text = f"one image is repeated for {end - first} frames while the arm moves"
                    texts.setdefault(episode.number, (text, float(episode.times[first])))
        if shares and np.median(shares) > 0.5:
            yield from group_findings(camera, texts)


def shrink_image(image: Array, side: int = SIDE) -> Array:
    """Return the means of an image uint8 [H, W, 3] over a grid, float32 [side, side, 3]; small ones are repeated."""
    height, width = image.shape[:2]
    scale = -(-side // min(height, width))
    image = image.repeat(scale, axis=0).repeat(scale, axis=1) if scale > 1 else image
    rows, columns = (np.arange(side) * size // side for size in image.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float32), rows, axis=0), columns, axis=1)
    counts = np.outer(np.diff([*rows, image.shape[0]]), np.diff([*columns, image.shape[1]]))
    return sums / counts[..., None].astype(np.float32)


def _find_empty(data: RecordedData, views: CameraImages) -> Iterator[DataFinding]:
    texts: dict[int, tuple[str, float | None]] = {}
    for episode in data.episodes:
        if episode.number not in views.images:
            continue
        images = views.images[episode.number]
        dark = images.mean(axis=(1, 2, 3)) < DARK
        plain = images.std(axis=(1, 2, 3)) < PLAIN
        if dark.any() or plain.any():
            word = "black" if dark.any() else "of one colour"
            first = int((dark | plain).argmax())
            texts[episode.number] = f"an image is {word}", _time_of(episode, first, len(images))
    yield from group_findings(views.camera, texts)


def _find_other_sizes(views: CameraImages) -> Iterator[DataFinding]:
    sizes = list(views.sizes.values())
    usual = max(set(sizes), key=sizes.count, default=(0, 0))
    texts: dict[int, tuple[str, float | None]] = {
        number: (f"its images are {size[0]} x {size[1]}, usually {usual[0]} x {usual[1]}", None)
        for number, size in views.sizes.items()
        if size != usual
    }
    yield from group_findings(views.camera, texts)


def _find_frozen(data: RecordedData, views: CameraImages) -> Iterator[DataFinding]:
    long_ones = {episode.number for episode in data.episodes if len(episode) >= LONG}
    changes = {
        number: float(np.abs(np.diff(images, axis=0)).mean())
        for number, images in views.images.items()
        if len(images) > 1 and number in long_ones
    }
    if not changes or np.quantile(list(changes.values()), 0.25) < MOVING:
        return
    frozen = tuple(number for number, change in changes.items() if change < STILL)
    if frozen:
        yield DataFinding(
            subject=views.camera, message="its images are the same throughout, unlike in others", episodes=frozen
        )


def _find_turned(views: CameraImages, others: Sequence[CameraImages]) -> Iterator[DataFinding]:
    """Yield episodes whose images are nearer to the usual one when turned, or to that of another camera."""
    usual = views.usual_image()
    middle = {number: images[len(images) // 2] for number, images in views.images.items()}
    distances = {number: float(np.abs(image - usual).mean()) for number, image in middle.items()}
    typical = float(np.median(list(distances.values())))
    other_usual = {one.camera: one.usual_image() for one in others if len(one.images) >= FEWEST}
    texts: dict[int, tuple[str, float | None]] = {}
    for number, image in middle.items():
        distance = distances[number]
        if distance < 1.5 * typical or distance < 2.0:
            continue
        turned = {word: float(np.abs(turn(image) - usual).mean()) for word, turn in TURNS.items()}
        turned |= {f"of {camera}": float(np.abs(image - other).mean()) for camera, other in other_usual.items()}
        word = min(turned, key=lambda one: turned[one])
        if turned[word] < FITS * distance:
            texts[number] = f"its images seem to be {word}, compared with other episodes", None
    yield from group_findings(views.camera, texts)


def _time_of(episode: InspectedEpisode, index: int, count: int) -> float:
    place = FRAMES[index] if count == len(FRAMES) else FRAMES[1]
    return float(episode.times[int(place * (len(episode) - 1))])
