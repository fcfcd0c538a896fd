"""From text to tokens and back: tokenizer, chat template, and stop strings."""

from pi_runtime.text.chat_template import render
from pi_runtime.text.stop_strings import StopStrings
from pi_runtime.text.tokenizer import Tokenizer

__all__ = ["StopStrings", "Tokenizer", "render"]
