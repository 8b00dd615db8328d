"""LIBERO-Plus's table of variants, and the choice of those that a spec evaluates. Needs no simulator."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from importlib import resources
from io import StringIO

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.randomness import derived_seed
from vla_rl.plugins.envs.libero.plus import ASSETS_VARIABLE, DIMENSIONS, SUITES, PlusConfig

TABLE = "variants.csv.gz"
"""Table written by tools/libero_plus_table.py: suite, name, dimension and level of each variant, in official order."""
WITH_VIEW = re.compile(
    r"(?P<base>.+?)(?:_language_(?P<language>\d+))?_view_(?P<view>\d+_\d+_\d+_\d+_\d+)_initstate_(?P<robot>\d+)"
    r"(?:_noise_(?P<noise>\d+))?"
)
WITHOUT_VIEW = re.compile(r"(?P<base>.+?)(?:_(?P<asset>light|table|tb|add)_\d+|(?:_moved)?_level\d+_sample\d+)")
FIRST_VARIANT, IDS_PER_SUITE = 1_000_000_000, 10_000
"""State ids: 1,000,000,000, plus 10,000 times the suite's number, plus the variant's official number in the suite."""
ARCHIVE = "the authors' assets.zip (data set Sylvest/LIBERO-plus on huggingface.co)"
"""What some variants need beyond LIBERO and the wheel."""
ASSETS = (
    f"need scenes, textures or meshes of {ARCHIVE}: unpack it, and name its folder by env.plus.assets=FOLDER or "
    f"{ASSETS_VARIABLE}"
)
PLAIN_VIEW = (0, 0, 100, 0, 0)
"""View of variants whose camera is not moved: turns of 0 degrees, the distance in percent."""


@frozen(kw_only=True)
class Variant:
    """One variant of a task: the base task's scene, changed in one dimension."""

    suite: str
    number: int
    """Official number within the suite, from 1."""
    name: str
    base: str
    """Name of the LIBERO task."""
    dimension: str
    level: int | None
    view: tuple[int, ...] = PLAIN_VIEW
    """Turns of the camera `agentview` in degrees and its distance in percent: horizontal, vertical, distance, turn of
    the view, tilt of the view."""
    language: int = 0
    """Number of the paraphrase; 0: none."""
    robot: int = 0
    """Number of the robot's perturbed joint positions, 1 to 500; 0: LIBERO's own."""
    noise: int = 0
    """Kind and severity of the sensor noise, 1 to 50; 0: none."""
    needs_assets: bool = False
    """The variant needs the authors' assets: scenes, textures or meshes that LIBERO does not have."""

    @property
    def state_id(self) -> int:
        return FIRST_VARIANT + SUITES.index(self.suite) * IDS_PER_SUITE + self.number

    @property
    def task_name(self) -> str:
        return f"{self.suite}/{self.name}"

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories in which results are reported: the dimension, and its level."""
        level = "no level" if self.level is None else f"level {self.level}"
        return self.dimension, f"{self.dimension}, {level}"

    @property
    def suffix_words(self) -> str:
        """Words that the official package appends to the instruction: the rest of the name."""
        return self.name.removeprefix(self.base).replace("_", " ")


def parse_variant(suite: str, number: int, name: str, dimension: str, level: int | None) -> Variant:
    """Return the variant that a name describes. Base names may contain words such as `_table_`, so only the end of the
    name counts."""
    make_variant = partial(Variant, suite=suite, number=number, name=name, dimension=dimension, level=level)
    match = WITH_VIEW.fullmatch(name)
    if match is not None:
        return make_variant(
            base=match["base"],
            view=tuple(int(part) for part in match["view"].split("_")),
            language=int(match["language"] or 0),
            robot=int(match["robot"]),
            noise=int(match["noise"] or 0),
        )
    match = WITHOUT_VIEW.fullmatch(name)
    if match is None:
        raise ValueError(f"no variant of LIBERO-Plus is called {name!r}")
    return make_variant(base=match["base"], needs_assets=match["asset"] is not None)


@cache
def all_variants() -> tuple[Variant, ...]:
    """Return all 10,030 variants, in official order."""
    table = resources.files("vla_rl.plugins.envs.libero.plus").joinpath(TABLE)
    text = gzip.decompress(table.read_bytes()).decode()
    numbers = Counter[str]()
    variants = []
    for suite, name, dimension, level in csv.reader(StringIO(text)):
        numbers[suite] += 1
        variants.append(parse_variant(suite, numbers[suite], name, dimension, int(level) if level else None))
    return tuple(variants)


@cache
def _variants_by_id() -> dict[int, Variant]:
    return {variant.state_id: variant for variant in all_variants()}


def variant_of(state_id: int) -> Variant:
    return _variants_by_id()[state_id]


def select_variants(config: PlusConfig) -> tuple[Variant, ...]:
    """Return the variants that a spec evaluates, in official order. Raise UserError if it selects none."""
    variants = filter_variants(config)
    if not variants:
        raise UserError("LIBERO-Plus has no variant with these suites, dimensions and levels")
    runnable = [variant for variant in variants if can_run(variant, config)]
    if not runnable:
        raise UserError(f"none of these variants can run: {left_out(variants, config)}")
    return sample_variants(runnable, min(config.sample or len(runnable), len(runnable)), config.sample_seed)


def can_run(variant: Variant, config: PlusConfig) -> bool:
    """Return whether the spec names what the variant needs."""
    return config.assets is not None or not variant.needs_assets


def left_out(variants: Sequence[Variant], config: PlusConfig) -> str:
    """Return which variants cannot run, and why; empty if all can."""
    missing = [variant for variant in variants if not can_run(variant, config)]
    if not missing:
        return ""
    return f"{describe_counts(missing)} {ASSETS}"


def list_remarks(config: PlusConfig) -> tuple[str, ...]:
    """Return what a reader of results has to know about the selection, for results.json."""
    variants, evaluated = filter_variants(config), select_variants(config)
    notes = [f"LIBERO-Plus: {len(evaluated)} of {len(variants)} variants are evaluated: {describe_counts(evaluated)}"]
    if len(evaluated) < len(variants) and config.sample is not None:
        notes.append(f"sample: stratified by dimension and level, sample_seed {config.sample_seed}")
    missing = left_out(variants, config)
    if missing:
        notes.append(f"left out: {missing}")
    with_assets = [variant for variant in evaluated if variant.needs_assets]
    if with_assets:
        notes.append(f"assets: {describe_counts(with_assets)} variants are built from the files in plus.assets")
    dimensions = {variant.dimension for variant in evaluated}
    if "robot" in dimensions and config.robot_states == "official":
        notes.append(
            "robot_states: official: the initial state overwrites the perturbed joints, as in the authors' code; only "
            "the controller's rest posture differs"
        )
    if "robot" in dimensions and config.robot_states == "perturbed":
        notes.append("robot_states: perturbed: episodes start with the perturbed joints, unlike in the authors' code")
    if dimensions != {"language"} and config.instructions == "task":
        notes.append("instructions: task: without the words of the variant's name that the authors' code appends")
    if "noise" in dimensions:
        notes.append("sensor noise has the authors' kinds and severities and our own keyed random numbers")
    return tuple(notes)


def filter_variants(config: PlusConfig) -> tuple[Variant, ...]:
    """Return the variants with these suites, dimensions and levels, in official order, before sampling."""
    return tuple(
        variant
        for variant in all_variants()
        if (config.suites is None or variant.suite in config.suites)
        and (config.dimensions is None or variant.dimension in config.dimensions)
        and (config.levels is None or variant.level in config.levels)
    )


def sample_variants(variants: Sequence[Variant], count: int, seed: int) -> tuple[Variant, ...]:
    """Return `count` variants, stratified by dimension and level. Each stratum has its share, rounded by largest
    remainders, so that the plain mean estimates the mean over all variants. Within a stratum variants are drawn by
    keyed random numbers."""
    strata: dict[tuple[str, int], list[Variant]] = {}
    for variant in variants:
        strata.setdefault((variant.dimension, variant.level or 0), []).append(variant)
    exact = {key: count * len(members) / len(variants) for key, members in strata.items()}
    sizes = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(exact, key=lambda key: (sizes[key] - exact[key], key))
    for key in by_remainder[: count - sum(sizes.values())]:
        sizes[key] += 1
    drawn = set[Variant]()
    for key, members in strata.items():
        keys = {v: derived_seed(seed, "libero_plus/sample", SUITES.index(v.suite), v.number) for v in members}
        drawn.update(sorted(members, key=keys.__getitem__)[: sizes[key]])
    return tuple(variant for variant in variants if variant in drawn)


def describe_counts(variants: Sequence[Variant]) -> str:
    """Return the number of variants of each dimension, in the authors' order: "1599 camera, 696 layout"."""
    by_dimension = Counter(variant.dimension for variant in variants)
    return ", ".join(f"{by_dimension[name]} {name}" for name in DIMENSIONS if by_dimension[name])
