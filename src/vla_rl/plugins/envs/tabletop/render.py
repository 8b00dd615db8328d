"""Batched rendering of the table: flat shapes painted in order, all envs and cameras at once, on any device. The table
has about the mean colour that ImageNet-normalised vision encoders subtract, so that the empty table becomes zeros and
saturated objects stand out."""

from __future__ import annotations

import torch

COLOURS = ((230, 30, 30), (20, 200, 40), (30, 60, 240), (245, 225, 20))
TABLE = (124, 116, 106)
DARK = (15, 15, 15)
BLOCK = 0.13
"""Half the edge of a block, in table units."""
PLATE = 0.2
"""Radius of a plate, in table units; its hub is a hole of the table's colour."""
HUB = 0.08
WRIST_VIEW = 1.25
"""Half the width that the wrist camera sees around the gripper, in table units."""


def pack_colour(colour: tuple[int, int, int]) -> int:
    """Return RGB as the int32 whose first three bytes in memory (little endian) are R, G and B."""
    red, green, blue = colour
    return red | green << 8 | blue << 16


class Renderer:
    """Renders the overhead and the wrist camera of N envs."""

    def __init__(self, size: int, device: str):
        self.size = size
        centres = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) * (2.0 / size) - 1.0
        self._x = centres
        self._y = -centres  # image rows run downwards
        self._palette = torch.tensor([pack_colour(c) for c in COLOURS], dtype=torch.int32, device=device)
        self._table = torch.tensor(pack_colour(TABLE), dtype=torch.int32, device=device)
        self._dark = torch.tensor(pack_colour(DARK), dtype=torch.int32, device=device)

    def __call__(
        self,
        gripper: torch.Tensor,
        closed: torch.Tensor,
        position: torch.Tensor,
        colour: torch.Tensor,
        is_plate: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two images uint8 [N, size, size, 3]: overhead and wrist.

        Args:
            gripper: [N, 2]; closed: bool [N]; position: [N, K, 2]; colour: int64 [N, K]; is_plate: bool [N, K].
            The last object may be in the gripper; plates are painted first, then blocks, then the fingers.
        """
        num_envs = len(gripper)
        zeros = torch.zeros_like(gripper)
        centre = torch.cat([zeros, gripper])  # [2N, 2]: where the camera looks
        scale = torch.ones(2 * num_envs, 1, device=gripper.device)
        scale[num_envs:] = WRIST_VIEW
        x = self._x * scale + centre[:, :1]  # [2N, W]: table coordinates of the pixel columns
        y = self._y * scale + centre[:, 1:]  # [2N, H]
        image = self._table.expand(2 * num_envs, self.size, self.size)
        position, plate = position.repeat(2, 1, 1), is_plate.repeat(2, 1)
        paint = self._palette[colour].repeat(2, 1)
        dx = x[:, None] - position[..., :1]  # [2N, K, W]
        dy = y[:, None] - position[..., 1:]
        # A plate is painted where dx^2 + dy^2 is in a band, a block where max(|dx|, |dy|) is small. One formula
        # serves both: per row and axis, a block's coordinates become 0 inside and far outside.
        px = torch.where(plate[..., None], dx.square(), _mark_outside(dx))
        py = torch.where(plate[..., None], dy.square(), _mark_outside(dy))
        order = torch.argsort(plate.to(torch.uint8), dim=1, descending=True, stable=True)
        low = torch.where(plate, HUB**2, -1.0)
        high = torch.where(plate, PLATE**2, 1.0)
        px, py = _reorder_objects(px, order), _reorder_objects(py, order)
        low, high, paint = low.gather(1, order), high.gather(1, order), paint.gather(1, order)
        for k in range(paint.shape[1]):
            radius = px[:, k, None, :] + py[:, k, :, None]
            mask = (radius <= high[:, k, None, None]) & (radius >= low[:, k, None, None])
            image = torch.where(mask, paint[:, k, None, None], image)
        fingers = self._mask_fingers(x, y, gripper.repeat(2, 1), closed.repeat(2))
        image = torch.where(fingers, self._dark, image)
        pixels = image.contiguous().view(torch.uint8).reshape(2 * num_envs, self.size, self.size, 4)[..., :3]
        overhead, wrist = pixels.contiguous().split(num_envs)
        return overhead, wrist

    @staticmethod
    def _mask_fingers(x: torch.Tensor, y: torch.Tensor, gripper: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        """Return the mask of the fingers, bool [N, H, W]: two upright bars on both sides of the gripper's centre,
        nearer to each other when closed."""
        inner = torch.where(closed, 0.1, 0.17)[:, None]
        dx, dy = (x - gripper[:, :1]).abs(), (y - gripper[:, 1:]).abs()
        return ((dx >= inner) & (dx <= inner + 0.06))[:, None, :] & (dy <= 0.12)[:, :, None]


def _mark_outside(distance: torch.Tensor) -> torch.Tensor:
    return (distance.abs() > BLOCK).to(distance.dtype) * 4.0


def _reorder_objects(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return values.gather(1, order[..., None].expand_as(values))
