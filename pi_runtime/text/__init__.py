"""From text to tokens and back: tokenizer, chat template, and stop strings.

Its modules are imported by themselves: rendering a template must not load what tokenizing needs.
"""
