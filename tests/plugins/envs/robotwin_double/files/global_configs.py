"""envs/_GLOBAL_CONFIGS.py: where a checkout has its files."""

from pathlib import Path

ROOT_PATH = f"{Path(__file__).resolve().parent.parent}/"
ASSETS_PATH = f"{ROOT_PATH}assets/"
CONFIGS_PATH = f"{ROOT_PATH}SETTINGS/"
DESCRIPTION_PATH = f"{ROOT_PATH}description/"
