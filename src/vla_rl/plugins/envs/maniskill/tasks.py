"""Instructions for ManiSkill's manipulation tasks, most of which come without any."""

from __future__ import annotations

_VALVE = "turn the valve {}"
_CUBE_IN_HAND = "rotate the object in the hand about the vertical axis"
_CUBE_TO_GOAL = "move the cube into the pose of the goal cube"

INSTRUCTIONS = {
    # one arm on a table; nothing to download
    "PickCube-v1": "pick up the red cube and move it to the green sphere",
    "PickCubeSO100-v1": "pick up the red cube and move it to the green sphere",
    "PushCube-v1": "push the blue cube to the red and white target",
    "PullCube-v1": "pull the blue cube to the red and white target",
    "PullCubeTool-v1": "pull the cube within reach with the L-shaped tool",
    "PokeCube-v1": "poke the red cube with the peg so that it moves to the red and white target",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "put the red cube next to the green cube and stack the blue cube on top of both",
    "LiftPegUpright-v1": "stand the peg upright on the table",
    "PegInsertionSide-v1": "insert the orange end of the peg into the hole in the box",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PlaceSphere-v1": "put the blue sphere into the bin",
    "RollBall-v1": "roll the ball to the red and white target",
    "PushT-v1": "push the T-shaped block onto the T-shaped target",
    "DrawTriangle-v1": "draw along the outline of the triangle",
    "FMBAssembly1Easy-v1": "assemble the parts on the red board",
    "SO100GraspCube-v1": "grasp the cube and lift it",
    # two arms
    "TwoRobotPickCube-v1": "hand the red cube over to the other robot and move it to the green sphere",
    "TwoRobotStackCube-v1": "put the green cube on the target and stack the blue cube on it",
    # hands and humanoids
    "RotateValveLevel0-v1": _VALVE.format("by a quarter"),
    **{f"RotateValveLevel{level}-v1": _VALVE.format("half around") for level in (1, 2, 3)},
    "RotateValveLevel4-v1": _VALVE.format("all the way around"),
    **{f"RotateSingleObjectInHandLevel{level}-v1": _CUBE_IN_HAND for level in range(4)},
    **{f"TriFingerRotateCubeLevel{level}-v1": _CUBE_TO_GOAL for level in range(5)},
    "UnitreeG1PlaceAppleInBowl-v1": "put the apple into the bowl",
    "UnitreeG1TransportBox-v1": "carry the box to the other table",
    # with assets to download
    "PutCarrotOnPlateInScene-v1": "put carrot on plate",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
    "PutEggplantInBasketScene-v1": "put eggplant into yellow basket",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
    "PickCubeWidowXAI-v1": "pick up the red cube and move it to the green sphere",
    "PickSingleYCB-v1": "pick up the object and move it to the green sphere",
    "AssemblingKits-v1": "put the piece into its place on the board",
    "TurnFaucet-v1": "turn on the faucet",
    "OpenCabinetDrawer-v1": "open the drawer of the cabinet",
    "OpenCabinetDoor-v1": "open the door of the cabinet",
    "InsertFlower-v1": "insert the flower into the vase",
}
"""Task -> instruction of the policy, unless the task or the spec gives another one."""

PANDA_TASKS = frozenset(
    f"{name}-v1"
    for name in (
        *("PickCube", "PushCube", "PullCube", "PullCubeTool", "PokeCube", "StackCube", "StackPyramid"),
        *("LiftPegUpright", "PegInsertionSide", "PlugCharger", "PlaceSphere", "RollBall"),
    )
)
"""Tasks of one Panda arm with its gripper."""
PANDA_ACTIONS = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8, "pd_joint_pos": 8}
"""Control mode of a Panda arm -> number of action dimensions."""
