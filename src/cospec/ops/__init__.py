"""Pure tensor functions: attention, shifts, losses, acceptance. They know nothing of models or training."""
