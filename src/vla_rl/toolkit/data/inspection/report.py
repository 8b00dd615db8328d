"""Looks at all of a recorded data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from attrs import evolve, frozen

from vla_rl.toolkit.data.idle_steps import find_idle_steps
from vla_rl.toolkit.data.inspection.gripper import find_reversed_grippers
from vla_rl.toolkit.data.inspection.images import CameraImages, find_image_faults, find_repeated_images, read_views
from vla_rl.toolkit.data.inspection.motion import describe_uncompared, find_motion_faults
from vla_rl.toolkit.data.inspection.outliers import find_outliers
from vla_rl.toolkit.data.inspection.recorded import DataFinding, RecordedData
from vla_rl.toolkit.data.inspection.values import find_number_faults


@frozen(kw_only=True, eq=False)
class InspectedData:
    """A data set, what is wrong with it, and the images that were read."""

    data: RecordedData
    findings: list[DataFinding]
    views: list[CameraImages]
    uncompared: str
    """Sentence about episodes that were not compared, and why; empty: all were."""


def inspect_recordings(data: RecordedData, all_images: bool = False) -> InspectedData:
    """Return what is wrong with a data set. Reads all numbers, and up to three images an episode and camera, or all."""
    findings = [*data.findings, *find_number_faults(data)]
    subsets = data.split_tasks()
    if all(np.isfinite(data.stack_rows(name)).all() for name in (data.action, data.state) if name is not None):
        findings += merge_findings(finding for one in subsets for finding in find_outliers(one))
        findings += [*find_motion_faults(data), *find_reversed_grippers(data), *find_idle_frames(data)]
    views, unreadable = read_views(data)
    known = {(finding.subject, number) for finding in data.findings for number in finding.episodes}
    findings += [
        finding  # what is wrong with a clock or video explains that an image of it cannot be read
        for finding in unreadable
        if not all({("clock", number), (finding.subject, number)} & known for number in finding.episodes)
    ]
    findings += merge_findings(finding for one in subsets for finding in find_image_faults(one, views))
    if all_images:
        findings += find_repeated_images(data)
    return InspectedData(data=data, findings=findings, views=views, uncompared=describe_uncompared(data))


def merge_findings(findings: Iterable[DataFinding]) -> list[DataFinding]:
    """Return the findings, those with one subject and text as one."""
    merged: dict[tuple[str, str], DataFinding] = {}
    for finding in findings:
        key = finding.subject, finding.message
        earlier = merged.get(key)
        merged[key] = finding if earlier is None else evolve(earlier, episodes=earlier.episodes + finding.episodes)
    return list(merged.values())


MANY_IDLE = 0.4
"""Share of idle frames from which it is reported."""


def find_idle_frames(data: RecordedData) -> Iterator[DataFinding]:
    """Yield that many frames of a data set are idle."""
    vectors = [episode.vectors for episode in data.episodes]
    idle = find_idle_steps([(one[data.action], None if data.state is None else one[data.state]) for one in vectors])
    share = float(np.concatenate(idle).mean())
    if share > MANY_IDLE:
        yield DataFinding(
            subject=data.action,
            message=f"nothing moves and no command changes in {share:.0%} of the frames; a clone learns to stand still",
            remedy="the data's key `drop_no_ops: true` leaves them out",
        )
