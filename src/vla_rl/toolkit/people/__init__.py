"""Questions to a person beside a robot, at a web page or in a terminal."""
