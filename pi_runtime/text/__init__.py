"""From text to tokens and back: tokenizer, chat template, stop strings, and grammars of answers.

Its modules are imported by themselves: rendering a template must not load what tokenizing needs.
"""
