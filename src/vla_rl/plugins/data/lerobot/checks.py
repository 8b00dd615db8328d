"""Checks a data set before anything of a run is built, when the simulator's cameras are not known yet."""

from __future__ import annotations

from vla_rl.core.contexts import CheckContext
from vla_rl.core.spec.structure import at
from vla_rl.plugins.data.lerobot.config import LeRobotConfig
from vla_rl.plugins.data.lerobot.episode_list import read_meta
from vla_rl.plugins.data.lerobot.frames import SUCCESS, choose_episodes, read_rows, refuse_first, select_by_labels
from vla_rl.plugins.data.lerobot.meta import find_feature_size, find_folder, pixels_of
from vla_rl.plugins.data.lerobot.video import find_clip_faults
from vla_rl.toolkit.data.episodes import EpisodeFilter


def check_data_set(config: LeRobotConfig, context: CheckContext) -> None:
    """Compare the chosen episodes with their clocks, their rows and the videos that `cameras` names. Reads index
    columns and the headers of video files. Raise UserError."""
    with at("folder"):
        folder = find_folder(config.folder)
        meta = read_meta(folder)
    named = {camera: name for camera, name in config.cameras.items() if name in meta.features}
    pixels = {}
    for camera, name in named.items():
        with at("cameras", camera):
            pixels[name] = pixels_of(folder, name, meta.features[name])
    videos = {name: most for name, most in pixels.items() if name in meta.video_names}
    with at("episodes"):
        chosen = EpisodeFilter(config.episodes)
        columns = {SUCCESS: find_feature_size(meta, str(folder), SUCCESS)} if chosen.needs_success else {}
        episodes = choose_episodes(folder, meta, chosen, videos)
    with at("folder"):
        rows = read_rows(folder, meta, episodes, columns, videos)
    with at("episodes"):
        rows = select_by_labels(str(folder), meta, rows, chosen)
    with at("folder"):
        refuse_first(str(folder), find_clip_faults(rows, meta.fps, videos))
