"""The guess stage: a head that drafts tokens is trained on the model's own answers."""

from pi_compile.training.guess.spec import GuessSpec, untrained
from pi_compile.training.guess.stage import announce, train_guess_head
