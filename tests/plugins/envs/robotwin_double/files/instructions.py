"""description/utils/generate_episode_instructions.py of RLinf_support, robotwin/description/instructions.py of the wheel.

main and stable_2.0 have the same without `seed`: there Python's global `random` chooses.
"""

import json
import random
import re
from pathlib import Path

HERE = Path(__file__).parent


def load_task_instructions(task_name):
    """The task's templates. The wheel raises ValueError, a checkout FileNotFoundError, for a task without."""
    return json.loads((HERE / "task_instruction" / f"{task_name}.json").read_text())


def generate_episode_descriptions(
    task_name: str, episodes: list, max_descriptions: int = 1000000, seed: int | None = None
):
    """-> one {"episode_index", "seen": [...], "unseen": [...]} an episode. Templates are shuffled; those whose
    placeholders are the episode's keys are filled in, arms (one small letter) being optional; at most
    `max_descriptions` of each kind, over and over the same templates. An episode without a template is left out."""
    if not isinstance(episodes, list) or not all(isinstance(episode, dict) for episode in episodes):
        raise TypeError(f"episodes is a list of dicts, placeholder -> value, got {episodes!r}")
    rng = random.Random(seed) if seed is not None else random
    data, made = load_task_instructions(task_name), []
    for i, episode in enumerate(episodes):
        if any(not re.fullmatch(r"\{\w\}", key) or not isinstance(value, str) for key, value in episode.items()):
            raise TypeError(f"placeholders are such as '{{A}}', and their values text: {episode}")
        things = {key.strip("{}"): value for key, value in episode.items()}
        fitting = {kind: _fitting(data[kind], set(things), rng) for kind in ("seen", "unseen")}
        if not any(fitting.values()):
            print(f"Episode {i}: No valid instructions found")
            continue
        texts = {kind: [] for kind in fitting}
        for kind, templates in fitting.items():
            while templates and len(texts[kind]) < max_descriptions:
                for template in templates[: max_descriptions - len(texts[kind])]:
                    texts[kind].append(_filled(template, things, kind, rng))
        made.append({"episode_index": i, **texts})
    return made


def _fitting(templates, keys, rng):
    templates = list(templates)
    rng.shuffle(templates)
    arms = {key for key in keys if key.islower()}
    return [text for text in templates if set(re.findall(r"{([^}]+)}", text)) in (keys, keys - arms)]


def _filled(template, things, kind, rng):
    for key, value in things.items():
        file = HERE / "objects_description" / f"{value}.json"
        if "/" in value and not file.is_file():
            raise ValueError(f"RoboTwin object description does not exist: {value!r}")
        if file.is_file():
            names = json.loads(file.read_text())
            text = f"the {rng.choice(names[kind] or names['seen'])}"
        else:
            text = f"the {value} arm" if key.islower() else value
        template = template.replace("{" + key + "}", text)
    return template
