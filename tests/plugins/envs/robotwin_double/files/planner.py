"""robotwin/envs/robot/planner.py of the wheel 0.1.3: mplib's planner as far as a caller sees it, and what is printed to
stderr where cuRobo is missing."""

import sys
import traceback

try:
    raise ModuleNotFoundError("No module named 'curobo'")
except Exception:
    print("[planner.py]: Something wrong happened when importing CuroboPlanner!")
    traceback.print_exc(file=sys.stderr)
    CuroboPlanner = None


class MplibWrapperPlanner:
    """Plans for the arm `active_joints_name` of an articulation with `all_joints`, in the articulation's order."""

    def __init__(self, robot_origion_pose, active_joints_name, all_joints, urdf_path=None, srdf_path=None):
        self.active_joints_name = active_joints_name
        self.all_joints = all_joints

    def plan_path(self, curr_joint_pos, target_gripper_pose):
        """mplib 0.2.1 writes the positions that it gets into the first joints of the articulation, so a plan starts
        from the right posture only if it gets those of all joints, or of the first ones."""
        indices = [self.all_joints.index(name) for name in self.active_joints_name]
        assumed = [0.0] * len(self.all_joints)
        for place, index in enumerate(indices):
            assumed[place] = curr_joint_pos[index]
        right = all(assumed[index] == curr_joint_pos[index] for index in indices)
        return {"status": "Success" if right else "RRTConnect Failed. Invalid start"}
