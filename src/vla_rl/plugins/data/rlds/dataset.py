"""Samples of an RLDS data set, also for `vla-rl data`: numbers are kept in memory, images are read on demand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from vla_rl.core.contexts import CheckContext, DataContext
from vla_rl.core.errors import UserError, did_you_mean, there_are
from vla_rl.core.hookspecs import Demonstrations
from vla_rl.core.spec.structure import at
from vla_rl.core.types import Array, Observation
from vla_rl.plugins.data.rlds.config import RLDSConfig
from vla_rl.plugins.data.rlds.tfrecord import Example, ExampleFeature, Span, find_records, read_bytes, read_example
from vla_rl.toolkit.data.episodes import EpisodeFilter, EpisodeLabels, exclude_remedy, format_numbers
from vla_rl.toolkit.data.idle_steps import choose_moving_steps
from vla_rl.toolkit.data.images import MAX_PIXELS, check_image, decode_image, stack_images
from vla_rl.toolkit.data.inspection.recorded import DataFinding, InspectedEpisode, RecordedData
from vla_rl.toolkit.data.samples import (
    StepWindows,
    check_finite,
    check_fit,
    compute_relative_statistics,
    compute_statistics,
    match_cameras,
)

DEPTH = 3
"""Most folder levels between `folder` and the files: DATA_SET/VERSION."""


def find_files(config: RLDSConfig) -> list[Path]:
    """Return the files of the split, in order. Raise UserError for none, for several data sets, and where one of the
    numbered files is missing."""
    folder = config.folder
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the one with the files NAME-{config.split}.tfrecord-...")
    for depth in range(DEPTH + 1):
        files = sorted(folder.glob(f"{'*/' * depth}*-{config.split}.tfrecord-*-of-*"))
        if files:
            break
    else:
        splits = sorted({file.name.split(".tfrecord")[0].rpartition("-")[2] for file in folder.rglob("*.tfrecord-*")})
        listed = f"; it has the splits {', '.join(splits)}" if splits else ""
        raise UserError(f"{folder} holds no files NAME-{config.split}.tfrecord-00000-of-...{listed}")
    sets = sorted({str(file.parent / file.name.partition(".tfrecord")[0]) for file in files})
    if len(sets) > 1:
        raise UserError(f"{folder} holds {len(sets)} data sets: {', '.join(sets[:5])}; give the folder of one")
    count = files[0].name.rpartition("-of-")[2]
    if not count.isdigit() or int(count) != len(files):
        raise UserError(f"{sets[0]}: {there_are(len(files), 'file')}, their names say {count}; download it again")
    return files


def check_folder(config: RLDSConfig, context: CheckContext) -> None:
    """Raise UserError for a folder that is not one complete data set."""
    with at("folder"):
        find_files(config)


STEPS = "steps/"
OBSERVATION = "observation/"
REWARD = "reward"
METADATA = "episode_metadata/"
logger = logging.getLogger(__name__)


@frozen(eq=False)
class RLDSEpisode:
    """An episode of T steps."""

    file: Path
    actions: Array
    """float32 [T, A]."""
    state: Array | None
    """float32 [T, S]."""
    instructions: list[str]
    images: dict[str, tuple[Span, ...]]
    """Places of a camera's images in `file`, by feature."""
    success: bool | None
    """Whether a step has a reward above 0; None: not read."""

    def take_steps(self, steps: Array) -> RLDSEpisode:
        """Return the episode with these steps, int64, alone."""
        return evolve(
            self,
            actions=self.actions[steps],
            state=None if self.state is None else self.state[steps],
            instructions=[self.instructions[step] for step in steps],
            images={feature: tuple(spans[step] for step in steps) for feature, spans in self.images.items()},
        )


class RLDSData(Demonstrations):
    """Demonstrations of an RLDS data set."""

    def __init__(self, config: RLDSConfig, context: DataContext) -> None:
        """Raise UserError for a folder without a complete data set, and for one that does not fit the simulator."""
        files = find_files(config)
        self._where = str(files[0].parent)
        self._config = config
        self._chunk = context.chunk
        self._uses_state = context.env.state_dim > 0
        self._cameras: dict[str, str] = {}
        self._episodes: list[RLDSEpisode] = []
        self._numbers_of_episodes: list[int] = []
        chosen, count = EpisodeFilter(config.episodes), 0
        empty: list[int] = []
        for number, record in enumerate(chain.from_iterable(map(find_records, files))):
            if chosen.is_past(number, number):
                break
            count += 1
            if not chosen.includes_episode(number, number):
                continue
            example = read_example(record)
            if not count_steps(example.features):
                empty.append(number)
                continue
            if not self._episodes:
                self._check_first_episode(example.features, context)
            try:
                self._episodes.append(self._parse_episode(record.file, example, chosen.needs_success))
            except UserError as exc:
                raise UserError(f"{exc}; repair episode {number}, or leave it out: {exclude_remedy([number])}") from exc
            self._numbers_of_episodes.append(number)
        if not count:
            raise UserError(f"{self._where}: its files are empty")
        chosen.check_choice(self._where, range(count))
        contents = [
            EpisodeLabels(number=number, instructions=frozenset(episode.instructions), success=episode.success)
            for number, episode in zip(self._numbers_of_episodes, self._episodes, strict=True)
        ]
        positions = chosen.select_labelled(self._where, contents)
        self._episodes = [self._episodes[position] for position in positions]
        self._numbers_of_episodes = [self._numbers_of_episodes[position] for position in positions]
        self._leave_out_last_steps()
        if empty:
            logger.warning("%s: episodes %s have no steps and are left out", self._where, format_numbers(empty))
        self._check_numbers()
        if config.drop_no_ops and self._episodes:
            moving = choose_moving_steps(self._where, [(one.actions, one.state) for one in self._episodes])
            self._episodes = [one.take_steps(steps) for one, steps in zip(self._episodes, moving, strict=True)]
        lengths = [len(episode.actions) for episode in self._episodes]
        self._windows = StepWindows(lengths, context.chunk if config.ends == "drop" else 1, self._where)

    def num_samples(self) -> int:
        return len(self._windows)

    def read_samples(self, indices: Any) -> tuple[Observation, Array]:
        positions = [
            (self._episodes[episode], int(step))
            for episode, step in zip(*self._windows.locate_samples(np.asarray(indices)), strict=True)
        ]
        images = {}
        for camera, feature in self._cameras.items():
            frames = [self._read_image(episode, feature, step) for episode, step in positions]
            images[camera] = stack_images(self._where, feature, frames)
        states = [episode.state[step] for episode, step in positions if episode.state is not None]
        observation = Observation(
            images=images,
            instructions=tuple(episode.instructions[step] for episode, step in positions),
            state=np.stack(states) if states else None,
        )
        following = np.arange(self._chunk)
        chunks = [
            episode.actions[np.minimum(step + following, len(episode.actions) - 1)] for episode, step in positions
        ]
        return observation, np.stack(chunks)

    def recorded_actions(self, indices: Any) -> Array | None:
        return self._windows.count_actions(np.asarray(indices), self._chunk) if self._config.ends == "mask" else None

    def data_statistics(self) -> Any:
        features = {"action": np.concatenate([episode.actions for episode in self._episodes])}
        states = [episode.state for episode in self._episodes if episode.state is not None]
        return compute_statistics(features | ({"state": np.concatenate(states)} if states else {}))

    def relative_statistics(self, references: Sequence[int | None]) -> Any:
        episodes = {
            number: (episode.actions, episode.state)
            for number, episode in zip(self._numbers_of_episodes, self._episodes, strict=True)
            if episode.state is not None
        }
        return compute_relative_statistics(self._where, episodes, references, self._chunk, self._config.ends)

    def _leave_out_last_steps(self) -> None:
        """Leave out each episode's last step, where its action is one that the writer filled in."""
        choice, actions = self._config.last_action, [episode.actions for episode in self._episodes]
        short = [number for number, rows in zip(self._numbers_of_episodes, actions, strict=True) if len(rows) == 1]
        if choice == "drop" and short:
            raise UserError(
                f"{self._where}: last_action: drop leaves no step of {format_numbers(short)}; {exclude_remedy(short)}"
            )
        if choice == "keep" or short or not actions:
            return
        filled = all(not rows[-1].any() or not np.isfinite(rows[-1]).all() for rows in actions)
        if choice == "auto" and filled:
            logger.warning(
                "%s: the last action of every episode is zeros or not finite, as writers of RLDS fill it in after the "
                "end; these steps are left out (last_action: keep learns them, drop leaves them out without this line)",
                self._where,
            )
        if choice == "drop" or filled:
            self._episodes = [one.take_steps(np.arange(len(one.actions) - 1)) for one in self._episodes]

    def _check_first_episode(self, features: dict[str, ExampleFeature], context: DataContext) -> None:
        """Compare the first episode with the simulator."""
        steps = count_steps(features)
        config = self._config
        sizes = [len(self._find_numbers(features, config.action)) // steps]
        sizes.append(len(self._find_numbers(features, config.state)) // steps if self._uses_state else 0)
        env = check_fit(self._where, context.env, *sizes)
        names = [name.removeprefix(STEPS) for name, feature in features.items() if feature.spans is not None]
        images = [name for name in names if name.startswith(OBSERVATION)]
        usual = {camera: OBSERVATION + camera for camera in env.cameras if camera not in images}
        self._cameras = match_cameras(self._where, env, images, {**usual, **config.cameras})

    def _parse_episode(self, file: Path, example: Example, needs_success: bool) -> RLDSEpisode:
        features = example.features
        steps = count_steps(features)
        episode = RLDSEpisode(
            file=file,
            actions=self._read_rows(features, self._config.action, steps),
            state=self._read_rows(features, self._config.state, steps) if self._uses_state else None,
            instructions=self._read_instructions(file, example, steps),
            images={name: self._find_spans(features, name) for name in self._cameras.values()},
            success=bool((self._find_numbers(features, REWARD) > 0).any()) if needs_success else None,
        )
        for name, spans in episode.images.items():
            if len(spans) != steps:
                raise UserError(f"{file}: an episode of {steps} steps has {len(spans)} images of {name}")
            try:
                check_image(example.read_span(spans[0]), MAX_PIXELS)
            except ValueError as exc:
                raise UserError(f"{file}: an image of {name} cannot be decoded ({exc})") from exc
        return episode

    def _read_instructions(self, file: Path, example: Example, steps: int) -> list[str]:
        name = self._config.instruction
        spans = self._find_spans(example.features, name)
        try:
            texts = [example.read_span(span).decode() for span in spans]
        except UnicodeDecodeError as exc:
            raise UserError(f"{file}: an instruction is not UTF-8 ({exc.reason}); download it again") from exc
        if name.startswith(METADATA):
            texts = texts * steps
        if len(texts) != steps:
            raise UserError(f"{file}: an episode of {steps} steps has {len(texts)} instructions")
        return texts

    def _read_rows(self, features: dict[str, ExampleFeature], name: str, steps: int) -> Array:
        numbers = self._find_numbers(features, name)
        if len(numbers) % steps:
            raise UserError(f"{self._where}: {name} has {len(numbers)} numbers in an episode of {steps} steps")
        rows: Array = numbers.reshape(steps, -1).astype(np.float32)
        return rows

    def _find_numbers(self, features: dict[str, ExampleFeature], name: str) -> Array:
        numbers = self._find_feature(features, name).numbers
        if numbers is None:
            raise UserError(f"{self._where}: {name} holds texts or images, numbers are expected")
        return numbers

    def _find_spans(self, features: dict[str, ExampleFeature], name: str) -> tuple[Span, ...]:
        spans = self._find_feature(features, name).spans
        if spans is None:
            raise UserError(f"{self._where}: {name} holds numbers, texts or images are expected")
        return spans

    def _find_feature(self, features: dict[str, ExampleFeature], name: str) -> ExampleFeature:
        full = name if name.startswith(METADATA) else STEPS + name
        if full not in features:
            names = [feature.removeprefix(STEPS) for feature in sorted(features)]
            raise UserError(
                f"{self._where} has no feature {name!r}{did_you_mean(name, names)}\n  it has: {', '.join(names)}"
            )
        return features[full]

    def _check_numbers(self) -> None:
        if not self._episodes:
            return
        lengths = [len(episode.actions) for episode in self._episodes]
        episodes = np.repeat(self._numbers_of_episodes, lengths)
        steps = np.concatenate([np.arange(length) for length in lengths])
        named = {"actions": [episode.actions for episode in self._episodes]}
        if self._uses_state:
            named["state"] = [episode.state for episode in self._episodes if episode.state is not None]
        for what, rows in named.items():
            widths = sorted({row.shape[1] for row in rows})
            if len(widths) > 1:
                raise UserError(f"{self._where}: its {what} have {' and '.join(map(str, widths))} numbers")
            check_finite(self._where, what, np.concatenate(rows), episodes, steps)

    def _read_image(self, episode: RLDSEpisode, feature: str, step: int) -> Array:
        try:
            return decode_image(read_bytes(episode.file, episode.images[feature][step]), MAX_PIXELS)
        except ValueError as exc:
            raise UserError(f"{episode.file}: an image of {feature} cannot be decoded ({exc})") from exc


def count_steps(features: dict[str, ExampleFeature]) -> int:
    """Return the steps of an episode, which every RLDS episode marks by `is_first`."""
    first = features.get(f"{STEPS}is_first", ExampleFeature()).numbers
    if first is None:
        raise UserError("an episode has no steps/is_first, as every RLDS data set has; is this one?")
    return len(first)


DEFAULTS = RLDSConfig(folder=Path())
MARKS = ("is_first", "is_last", "is_terminal")
"""Numbers that say where an episode begins and ends."""


def open_recordings(folder: Path) -> RecordedData:
    """Open the split `train` of a folder. Raise UserError for a folder without one complete data set."""
    files = find_files(RLDSConfig(folder=folder))
    episodes: list[InspectedEpisode] = []
    findings: list[DataFinding] = []
    images: dict[int, tuple[Path, dict[str, tuple[Span, ...]]]] = {}
    for number, record in enumerate(chain.from_iterable(map(find_records, files))):
        example = read_example(record)
        try:
            steps = count_steps(example.features)
            if not steps:
                findings.append(DataFinding(subject="rows", message="has no steps", episodes=(number,)))
                continue
            vectors = _read_vectors(example, steps)
            if DEFAULTS.action not in vectors:
                raise UserError(f"it has no {DEFAULTS.action}; it has: {', '.join(sorted(vectors)) or 'no numbers'}")
        except UserError as exc:
            findings.append(DataFinding(subject="rows", message=str(exc), episodes=(number,)))
            continue
        images[number] = record.file, _find_images(example, steps)
        episodes.append(
            InspectedEpisode(
                number=number,
                task=_read_task(example),
                times=np.arange(steps, dtype=np.float64),
                vectors=vectors,
            )
        )
    if not episodes:
        raise UserError(
            f"{folder}: none of its episodes can be read: {findings[0].message if findings else 'no records'}"
        )
    common = set.intersection(*(set(episode.vectors) for episode in episodes))
    widths = {name: {episode.vectors[name].shape[1] for episode in episodes} for name in common}
    for name in [name for name, sizes in widths.items() if len(sizes) > 1]:
        text = f"its episodes have {' and '.join(map(str, sorted(widths[name])))} numbers"
        findings.append(DataFinding(subject=name, message=text))
    kept = [name for name in episodes[0].vectors if len(widths.get(name, ())) == 1]

    def read_image(episode: InspectedEpisode, camera: str, frame: int) -> Array:
        file, spans = images[episode.number]
        if camera not in spans:
            raise UserError("it has another number of images than steps")
        try:
            return decode_image(read_bytes(file, spans[camera][frame]), MAX_PIXELS)
        except ValueError as exc:
            raise UserError(f"an image cannot be decoded ({exc})") from exc

    return RecordedData(
        folder=folder,
        layout="RLDS",
        fps=None,
        episodes=[evolve(episode, vectors={name: episode.vectors[name] for name in kept}) for episode in episodes],
        action=DEFAULTS.action,
        state=DEFAULTS.state if DEFAULTS.state in kept else None,
        cameras=sorted({name for _, spans in images.values() for name in spans}),
        read_image=read_image,
        findings=findings,
    )


def _read_vectors(example: Example, steps: int) -> dict[str, Array]:
    """Return the numbers of each step, by feature, float32 [steps, D]."""
    vectors = {}
    for full, feature in example.features.items():
        name = full.removeprefix(STEPS)
        numbers = feature.numbers
        if full.startswith(STEPS) and name not in MARKS and numbers is not None and len(numbers):
            if len(numbers) % steps:
                raise UserError(f"{name} has {len(numbers)} numbers in an episode of {steps} steps")
            vectors[name] = numbers.reshape(steps, -1).astype(np.float32)
    return vectors


def _find_images(example: Example, steps: int) -> dict[str, tuple[Span, ...]]:
    """Return the places of the images of each camera, where there is one for each step."""
    return {
        name.removeprefix(STEPS): feature.spans
        for name, feature in example.features.items()
        if name.startswith(STEPS + OBSERVATION) and feature.spans is not None and len(feature.spans) == steps
    }


def _read_task(example: Example) -> str:
    spans = example.features.get(STEPS + DEFAULTS.instruction)
    if spans is None or not spans.spans:
        return "unknown"
    return example.read_span(spans.spans[0]).decode("utf-8", "replace")
