"""envs/camera/camera.py, the same in all sources as far as a caller sees it: cameras of the sizes of `_camera_config`, added
to the scene. SAPIEN's scene draws; here it notes sizes."""

SIZES = {"D435": (240, 320), "Large_D435": (480, 640), "L515": (180, 320), "Large_L515": (360, 640)}


class Scene:
    """SAPIEN's scene, whose `step` is a physics step of 1/250 s."""

    def __init__(self):
        self.sizes = {}

    def step(self):
        pass

    def add_camera(self, name, width, height, fovy, near, far):
        self.sizes[name] = height, width


class Camera:
    def __init__(self, camera):
        self.camera = camera

    def load_camera(self, scene):
        for name, kind, collect in (
            ("left_camera", "wrist_camera_type", "collect_wrist_camera"),
            ("right_camera", "wrist_camera_type", "collect_wrist_camera"),
            ("head_camera", "head_camera_type", "collect_head_camera"),
        ):
            if self.camera.get(collect, True):
                height, width = SIZES[self.camera.get(kind, "D435")]
                scene.add_camera(name=name, width=width, height=height, fovy=0.65, near=0.1, far=100)
        self.sizes = dict(scene.sizes)
