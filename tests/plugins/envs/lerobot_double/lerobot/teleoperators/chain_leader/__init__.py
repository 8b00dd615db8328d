from lerobot.teleoperators.chain_leader.chain_leader import ChainLeader, ChainStick
from lerobot.teleoperators.chain_leader.config_chain_leader import ChainLeaderConfig, ChainStickConfig

__all__ = ["ChainLeader", "ChainLeaderConfig", "ChainStick", "ChainStickConfig"]
