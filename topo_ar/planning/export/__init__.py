"""Plans and schedules in the formats of other programs, one target a module."""
