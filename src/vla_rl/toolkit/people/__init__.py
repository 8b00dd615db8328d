"""Questions to a person next to a robot, at a web page or in a terminal."""
