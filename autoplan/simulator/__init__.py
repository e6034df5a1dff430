"""The simulator: replays one plan event by event, and says how long a step takes and what memory it needs."""
