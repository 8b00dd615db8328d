"""Warp kernels around the physics of a batch: what an action reports and puts back, and images."""

from __future__ import annotations

import warp as wp


@wp.kernel(enable_backward=False)
def count_contacts(substep: int, num_contacts: wp.array[int], worlds: wp.array[int], counts: wp.array2d[int]) -> None:
    entry = wp.tid()
    if entry < num_contacts[0]:
        wp.atomic_add(counts, substep, worlds[entry], 1)


@wp.kernel(enable_backward=False)
def report_worlds(
    own_overflows: int,
    active: wp.array[bool],
    overflow: wp.array[int],
    counts: wp.array2d[int],
    held: wp.array2d[bool],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    report: wp.array2d[int],
    moved: wp.array[bool],
) -> None:
    """Write what the host reads of each world, and which worlds keep the action. Columns of the report: overflows, most
    contacts in a sub-step, whether positions and velocities are finite, and success."""
    world = wp.tid()
    most = wp.int32(0)
    sound = wp.int32(1)
    success = wp.int32(1)
    for substep in range(counts.shape[0]):
        most = wp.max(most, counts[substep, world])
    for i in range(qpos.shape[1]):
        sound &= int(wp.isfinite(qpos[world, i]))
    for i in range(qvel.shape[1]):
        sound &= int(wp.isfinite(qvel[world, i]))
    for i in range(held.shape[1]):
        success &= int(held[world, i])
    report[world, 0] = overflow[world]
    report[world, 1] = most
    report[world, 2] = sound
    report[world, 3] = success
    moved[world] = active[world] and sound == 1 and overflow[world] & own_overflows == 0


@wp.kernel(enable_backward=False)
def put_back(moved: wp.array[bool], before: wp.array2d[float], state: wp.array2d[float]) -> None:
    """Restore the worlds that did not move."""
    world, i = wp.tid()
    if not moved[world]:
        state[world, i] = before[world, i]


@wp.kernel(enable_backward=False)
def unpack_image(first: int, packed: wp.array2d[wp.uint32], images: wp.array4d[wp.uint8]) -> None:
    """Write one camera's images, whose packed pixels begin at `first`. The bytes of a pixel are blue, green, red and
    opacity. LIBERO's frames are upside down, and policies see them rotated by 180 degrees, which mirrors them."""
    world, row, column = wp.tid()
    width = images.shape[2]
    pixel = packed[world, first + row * width + width - 1 - column]
    for channel in range(3):
        images[world, row, column, channel] = wp.uint8(pixel >> wp.uint32(16 - 8 * channel))
