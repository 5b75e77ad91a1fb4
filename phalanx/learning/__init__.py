"""From experience to gradients: the learner, and the one whose updates are CUDA graphs."""
