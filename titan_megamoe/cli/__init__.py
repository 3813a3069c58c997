"""The command ``titan-megamoe``: what one does before and around a training run."""
