"""Draft checkpoints in the formats that servers and trainers read."""
