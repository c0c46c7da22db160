"""Where the engine plugs into training code."""
