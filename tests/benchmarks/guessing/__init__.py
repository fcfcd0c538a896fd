"""What guesses gain where a real model chooses its answers: with a guess head that was trained, and with grammars."""
