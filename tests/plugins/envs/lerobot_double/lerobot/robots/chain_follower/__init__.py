from lerobot.robots.chain_follower.chain_follower import ChainFollower
from lerobot.robots.chain_follower.config_chain_follower import ChainFollowerConfig

__all__ = ["ChainFollower", "ChainFollowerConfig"]
