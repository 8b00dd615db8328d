"""A checkpoint as a policy for robots and other people's simulators: in this process, or over a websocket."""
